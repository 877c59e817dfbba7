"""What an error for a user must look like, whatever a stranger put into the file it names."""

from __future__ import annotations


def check_one_line(error: Exception, max_chars: int = 1500) -> str:
    """The message, after checking that it is one short printable line."""
    text = str(error)
    assert 0 < len(text) < max_chars, f"{len(text)} characters: {text[:200]}"
    assert text.isprintable(), repr(text[:200])
    return text

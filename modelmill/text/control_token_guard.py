"""Keeps control tokens that a user typed apart from those that the template writes.

Before rendering, a private character (the mark) is put inside everything in the request that spells
a
control token, or that could become one together with its neighbour. After rendering, only what the
template itself wrote can still be read as a control token; then the marks are taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.trie_regex import trie_regex

MARK_CHAR_CODE_POINTS = range(0xE000, 0xF900)


class ControlTokenGuard:
    """Knows the control tokens of one tokenizer."""

    def __init__(self, special: Iterable[str]) -> None:
        texts = [text for text in special if len(text) > 1]
        # Any case: a template may change it (`| lower`).
        self._first = (
            re.compile(f"(?={trie_regex(texts)})(.)", re.IGNORECASE | re.DOTALL) if texts else None
        )
        self._heads = {text[:size].lower() for text in texts for size in range(1, len(text))}
        self._tails = {text[-size:].lower() for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def insert_guard_chars(self, value: Any, mark: str) -> Any:
        """A copy of JSON data with the mark inside every text that needs one, keys included."""
        if isinstance(value, str):
            return self._insert_guard_chars_in_text(value, mark)
        if isinstance(value, Mapping):
            return {
                self._insert_guard_chars_in_text(key, mark): self.insert_guard_chars(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.insert_guard_chars(item, mark) for item in value]
        return value

    def _insert_guard_chars_in_text(self, text: str, mark: str) -> str:
        if self._first is None or not text:
            return text
        body = text.strip()
        start = text.find(body)
        before, after = text[:start], text[start + len(body) :]
        marked = self._first.sub(lambda match: match[1] + mark, body)
        # Half a token at an edge may meet its other half in the next field (and a template may
        # trim).
        sizes = range(1, min(self._longest, len(body) + 1))
        if any(body[:size].lower() in self._tails for size in sizes):
            marked = mark + marked
        if any(body[-size:].lower() in self._heads for size in sizes):
            marked += mark
        return before + marked + after


def find_unused_mark_char(texts: Iterable[str]) -> str:
    r"""Return a private-use character that occurs in none of `texts`, also not as a \u escape.

    Raises:
        RequestError: if the texts contain all of them.
    """
    whole = "\n".join(texts).lower()
    for code in MARK_CHAR_CODE_POINTS:
        if chr(code) not in whole and f"\\u{code:04x}" not in whole:
            return chr(code)
    raise RequestError(
        "the conversation holds every private character (U+E000 to U+F8FF); leave one of them out"
    )


def remove_guard_chars(text: str, mark: str) -> str:
    r"""Remove the marks from `text`, also where a filter wrote them as \u escapes."""
    text = text.replace(mark, "")
    return text.replace(f"\\u{ord(mark):04x}", "") if "\\u" in text else text


def iter_strings(value: Any) -> Iterable[str]:
    """Yield every string in JSON data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_strings(item)

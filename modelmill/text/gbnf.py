"""Grammars in llama.cpp's notation (GBNF), converted to Lark by llguidance."""

from __future__ import annotations

from modelmill.core.errors import MissingDependency, RequestError
from modelmill.core.packages import install_command
from modelmill.core.quoting import truncate_to_one_line
from modelmill.core.types import Grammar

MAX_GRAMMAR_ERROR_CHARS = 200
MAX_GRAMMAR_CHARS = 1 << 16
"""Its converter is in Python: a longer text would hold up other requests."""


def gbnf_to_lark_grammar(text: str, field: str = "grammar") -> Grammar:
    """Convert a grammar; text that is Lark already stays as it is.

    Args:
        text: in either notation.
        field: of the request, for errors.

    Raises:
        RequestError: it is neither.
    """
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ModuleNotFoundError:
        raise MissingDependency(
            f"structured output needs llguidance; install it with: {install_command('serve')}"
        ) from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{field}: it has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed"
        )
    try:
        return Grammar("lark", any_to_lark(text))
    except Exception as error:  # a missing rule is a bare Exception there
        line = truncate_to_one_line(str(error), MAX_GRAMMAR_ERROR_CHARS)
        raise RequestError(f"{field}: it is no grammar in GBNF or Lark: {line}") from None

"""Errors of libraries that are written in Rust: those of tokenizers and of grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelmill.core.errors import TokenizerError


def build_raising_tokenizer_error(file: str, build: Callable[[], Any]) -> Any:
    """Return ``build()``; the library's exceptions become TokenizerErrors that name the file."""
    try:
        return build()
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise TokenizerError(f"{file} cannot be read as a tokenizer: {reason}") from None


def is_rust_panic(error: BaseException) -> bool:
    """Whether a library panicked, which Python code would otherwise treat as an interrupt."""
    return type(error).__name__ == "PanicException"

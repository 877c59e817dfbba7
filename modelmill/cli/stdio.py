"""stdout and stderr that outlive their reader: a verb goes on to its own end and its own exit code.

A reader that leaves (``| head -1``) is no error: what is still said goes nowhere. A disk that is
full is one, told once and in one line. A stream that was closed before the start (``>&-``) is a
stream to nowhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from modelmill.core.errors import ModelmillError


class SafeOutput(io.FileIO):
    """A descriptor that is written until it fails. reader_gone: nobody reads it any more; all that
    is written is dropped."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.reader_gone = False
        self._name = name

    def write(self, data: Any, /) -> int:
        """Write or drop all of it.

        Raises ModelmillError, once, where the descriptor takes none (a full disk).
        """
        rest = memoryview(data).cast("B")
        while rest and not self.reader_gone:
            try:
                rest = rest[super().write(rest) or 0 :]
            except BrokenPipeError:
                self.reader_gone = True
            except OSError as error:
                self.reader_gone = True
                why = error.strerror or error
                raise ModelmillError(
                    f"cannot write to {self._name}: {why}; not all was told"
                ) from None
        return memoryview(data).nbytes


@contextlib.contextmanager
def tolerate_closed_output() -> Iterator[None]:
    """While it is entered stdout and stderr are ``SafeOutput``s, and no stream is missing.

    Bytes that are no UTF-8, and characters that the terminal has not, become replacement marks, not
    tracebacks.
    """
    with contextlib.ExitStack() as kept:
        before = sys.stdin
        kept.callback(setattr, sys, "stdin", before)
        if before is None:
            sys.stdin = kept.enter_context(open(os.devnull, encoding="utf-8"))
        elif isinstance(before, io.TextIOWrapper):
            before.reconfigure(encoding="utf-8", errors="replace")
        kept.enter_context(contextlib.redirect_stdout(_safe_stream(sys.stdout, "stdout")))
        kept.enter_context(contextlib.redirect_stderr(_safe_stream(sys.stderr, "stderr")))
        try:
            yield
        finally:
            with contextlib.suppress(ModelmillError):
                sys.stderr.flush()


def stdout_reader_gone() -> bool:
    """Whether what goes to stdout reaches nobody any more."""
    buffer = getattr(sys.stdout, "buffer", None)
    return bool(getattr(getattr(buffer, "raw", buffer), "reader_gone", False))


def _safe_stream(stream: TextIO | None, name: str) -> TextIO:
    """A stream like this one that outlives its reader; one without a descriptor stays what it
    is.
    """
    if stream is None:
        # takes the free descriptor, which no engine's file may get
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    try:
        descriptor = stream.fileno()
    except OSError:
        stream.reconfigure(errors="replace")
        return stream
    output = SafeOutput(descriptor, name)
    return io.TextIOWrapper(
        output if stream.write_through else io.BufferedWriter(output),  # as python -u does
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )

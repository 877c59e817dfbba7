"""stdout and stderr that survive a closed pipe: a verb finishes with its own exit code.

If the reader of a pipe exits (``| head -1``), further output is dropped without an error. A full
disk is an error, reported once in one line. A stream that was closed before the start (``>&-``)
drops all output.
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
    """A file descriptor that is written until a write fails.

    Attributes:
        reader_gone: the reader is gone or a write failed; all further output is dropped.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.reader_gone = False
        self._name = name

    def write(self, data: Any, /) -> int:
        """Write or drop all of ``data``.

        Raises:
            ModelmillError: once, if the descriptor cannot be written (a full disk).
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
                    f"cannot write to {self._name}: {why}; the output is incomplete"
                ) from None
        return memoryview(data).nbytes


@contextlib.contextmanager
def tolerate_closed_output() -> Iterator[None]:
    """Replace stdout and stderr by ``SafeOutput``s within the context; no stream is missing.

    Bytes that are not UTF-8, and characters that the terminal lacks, become replacement characters
    instead of tracebacks.
    """
    with contextlib.ExitStack() as stack:
        previous_stdin = sys.stdin
        stack.callback(setattr, sys, "stdin", previous_stdin)
        if previous_stdin is None:
            sys.stdin = stack.enter_context(open(os.devnull, encoding="utf-8"))
        elif isinstance(previous_stdin, io.TextIOWrapper):
            previous_stdin.reconfigure(encoding="utf-8", errors="replace")
        stack.enter_context(contextlib.redirect_stdout(_safe_stream(sys.stdout, "stdout")))
        stack.enter_context(contextlib.redirect_stderr(_safe_stream(sys.stderr, "stderr")))
        try:
            yield
        finally:
            with contextlib.suppress(ModelmillError):
                sys.stderr.flush()


def stdout_reader_gone() -> bool:
    """Whether the reader of stdout is gone."""
    buffer = getattr(sys.stdout, "buffer", None)
    return bool(getattr(getattr(buffer, "raw", buffer), "reader_gone", False))


def _safe_stream(stream: TextIO | None, name: str) -> TextIO:
    """Return a stream that survives its reader; a stream without a descriptor is unchanged."""
    if stream is None:
        # occupies the free descriptor 1 or 2, so that no engine file gets it
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

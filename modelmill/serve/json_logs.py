"""Server logs: one JSON object per line on stderr.

They never contain prompts, outputs or keys. The event loop does not wait for their reader,
which may stop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO


class JsonLogFormatter(logging.Formatter):
    """Formats a record as one line.

    Of an exception it logs the class and traceback, not the text, which may contain anything.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format as JSON without line breaks."""
        # asyncio's message about a task that was never awaited quotes its exception
        event = "bug" if record.name == "asyncio" else record.getMessage()
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": event,
            **getattr(record, "data", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-12:]
            entry["error"] = type(error).__name__
            entry["where"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(entry, ensure_ascii=True)


class UnblockedLogHandler(logging.Handler):
    """Writes lines to a stream as far as its reader takes them, and never waits for the reader.

    While a pipe or terminal is full, one line waits and later ones are dropped. Once it is read
    again, a line says how many are missing.
    """

    def __init__(self, stream: TextIO) -> None:
        """stream: of ASCII lines; one without a descriptor always takes them."""
        super().__init__()
        self._stream = stream
        self._poll: select.poll | None = None
        with contextlib.suppress(OSError):
            descriptor = stream.fileno()
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLOUT)
        self._pending = ""
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop it if an earlier one still waits."""
        try:
            if not self._try_write_pending():
                self._num_dropped += 1
                return
            self._pending = self.format(record) + "\n"
            if self._num_dropped:
                self._pending = self._format_num_dropped() + "\n" + self._pending
                self._num_dropped = 0
            self._try_write_pending()
        except Exception:
            self.handleError(record)

    def _format_num_dropped(self) -> str:
        fields = {"levelname": "WARNING", "msg": "log lines dropped"}
        return self.format(logging.makeLogRecord({**fields, "data": {"lines": self._num_dropped}}))

    def _try_write_pending(self) -> bool:
        """Write what waits, as much as the stream takes now; whether that is all."""
        while self._pending:
            if self._poll is not None and not self._poll.poll(0):
                return False
            # a pipe that takes anything takes so many bytes
            part, self._pending = (
                self._pending[: select.PIPE_BUF],
                self._pending[select.PIPE_BUF :],
            )
            self._stream.write(part)
            self._stream.flush()
        return True


@contextlib.contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """Context that logs to stderr: modelmill from ``level``, and errors of uvicorn and asyncio.

    Without a handler, Python would print asyncio's messages with the texts of exceptions, which may
    contain anything.
    """
    handler = UnblockedLogHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    levels = {
        logging.getLogger("modelmill"): level.upper(),
        logging.getLogger("uvicorn.error"): "ERROR",
    }
    levels[logging.getLogger("asyncio")] = "ERROR"
    saved = {logger: (logger.handlers, logger.propagate, logger.level) for logger in levels}
    for logger, new_level in levels.items():
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(new_level)
    try:
        yield
    finally:
        for logger, (handlers, propagate, old_level) in saved.items():
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old_level)

"""Server logs: one JSON object per line on stderr.

They never contain prompts, outputs or keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime


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


@contextlib.contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """Context that logs to stderr: modelmill from ``level``, and errors of uvicorn and asyncio.

    Without a handler, Python would print asyncio's messages with the texts of exceptions, which may
    contain anything.
    """
    handler = logging.StreamHandler(sys.stderr)
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

"""Logs of a server: one JSON object a line on stderr.

Prompts, answers and keys are never in them.
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
    """A record as one line; of an exception its kind and where it was raised, not its text, which
    may hold anything.
    """

    def format(self, record: logging.LogRecord) -> str:
        """JSON without line breaks."""
        # what asyncio says of a task that nobody waited for quotes its exception
        event = "bug" if record.name == "asyncio" else record.getMessage()
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": event,
            **getattr(record, "data", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-12:]
            told["error"] = type(error).__name__
            told["where"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(told, ensure_ascii=True)


@contextlib.contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """While it is entered, what modelmill logs goes to stderr from ``level`` on, and errors of
    uvicorn and asyncio.

    Without a handler of its own, Python would print asyncio's with the texts of exceptions, which
    may hold anything."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    levels = {
        logging.getLogger("modelmill"): level.upper(),
        logging.getLogger("uvicorn.error"): "ERROR",
    }
    levels[logging.getLogger("asyncio")] = "ERROR"
    before = {logger: (logger.handlers, logger.propagate, logger.level) for logger in levels}
    for logger, wanted in levels.items():
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(wanted)
    try:
        yield
    finally:
        for logger, (handlers, propagate, was) in before.items():
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(was)

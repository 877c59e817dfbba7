"""Logs of a server: one JSON object a line on stderr. Prompts, answers and keys are never in them."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")


class Lines(logging.Formatter):
    """A record as one line; of an exception its kind and where it was raised, not its text, which may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        """JSON without line breaks."""
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-12:]
            told["error"] = type(error).__name__
            told["where"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(told, ensure_ascii=True)


def set_up(level: str) -> None:
    """Send what modelmill logs to stderr from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name in ("modelmill", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "modelmill" else logging.ERROR)

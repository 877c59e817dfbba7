"""``modelmill ps``: lists the running servers."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import emit_json, print_note, print_table
from modelmill.core.byte_size import format_bytes
from modelmill.core.server_records import ServerRecord, running_servers

HELP = "List this user's running servers: models, address, state, memory."
EPILOG = """Examples:

  modelmill ps

  modelmill ps --json"""

HEALTH_SECONDS = 2.0
"""How long a server may take to tell its state."""
NO_ANSWER = "no answer"


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Nothing of its own."""


def run(args: Args) -> int:
    """Print a line for each server."""
    servers = running_servers()
    facts = [
        {
            "models": list(server.models),
            "url": server.url,
            "pid": server.pid,
            "state": server_state(server),
            "seconds": round(time.time() - server.started),
            "memory_bytes": server.memory_bytes,
        }
        for server in servers
    ]
    if args.json:
        emit_json(facts)
    elif not facts:
        print_note("no server is running; start one with: modelmill serve ENGINE")
    else:
        rows = [
            (
                ", ".join(each["models"]),  # type: ignore[arg-type]
                each["url"],
                each["state"],
                duration(int(each["seconds"])),  # type: ignore[call-overload]
                format_bytes(int(each["memory_bytes"])),  # type: ignore[call-overload]
                str(each["pid"]),
            )
            for each in facts
        ]
        print_table(("models", "url", "state", "up", "memory", "pid"), rows)
    return 0


def server_state(server: ServerRecord) -> str:
    """Return the state that ``/health`` tells: ok, loading, draining, unavailable or no answer."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=HEALTH_SECONDS) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 has a body, too
        body = error.read()
    except (OSError, http.client.HTTPException):
        return NO_ANSWER
    try:
        return str(json.loads(body)["status"])
    except (ValueError, KeyError, TypeError):
        return NO_ANSWER


def duration(seconds: int) -> str:
    """Return 42 s, 12 min, 3 h 5 min or 2 d 4 h."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds} s"

"""``modelmill ps``: lists the running servers."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_json, print_note, print_table
from modelmill.core.byte_size import format_bytes
from modelmill.core.server_records import ServerRecord, list_running_and_prune_stale

HELP = "List this user's running servers: models, address, state, memory."
EPILOG = """Examples:

  modelmill ps

  modelmill ps --json"""

HEALTH_TIMEOUT_SECONDS = 2.0
"""How long a server may take to tell its state."""
NO_ANSWER_STATE = "no answer"
READY_STATE = "ready"
"""State of a loaded model, which is not shown."""


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Nothing of its own."""


def run(args: Args) -> int:
    """Print a line for each server."""
    facts = [fetch_server_facts(server) for server in list_running_and_prune_stale()]
    if args.json:
        print_json(facts)
    elif not facts:
        print_note("no server is running; start one with: modelmill serve ENGINE")
    else:
        rows = [
            (
                format_served_models(each),
                each["url"],
                each["state"],
                format_duration(each["seconds"]),
                format_bytes(each["memory_bytes"]),
                str(each["pid"]),
            )
            for each in facts
        ]
        print_table(("models", "url", "state", "up", "memory", "pid"), rows)
    return 0


def fetch_server_facts(server: ServerRecord) -> dict[str, Any]:
    """Return what is shown of a server.

    Its models are those that ``/health`` tells, since they come and go; those that it was started
    with if it does not answer.
    """
    health = fetch_server_health(server)
    engines = health.get("engines")
    states = {
        str(each["name"]): str(each["state"])
        for each in (engines if isinstance(engines, list) else ())
        if isinstance(each, dict) and {"name", "state"} <= set(each)
    }
    return {
        "models": list(states) if isinstance(engines, list) else list(server.models),
        "model_states": states,
        "url": server.url,
        "pid": server.pid,
        "state": str(health.get("status", NO_ANSWER_STATE)),
        "seconds": round(time.time() - server.started),
        "memory_bytes": server.memory_bytes,
    }


def format_served_models(server: Mapping[str, Any]) -> str:
    """Return the models of a server's facts in one line; one that is not ready with its state."""
    states = server["model_states"]
    names = (
        name if states.get(name, READY_STATE) == READY_STATE else f"{name} ({states[name]})"
        for name in server["models"]
    )
    return ", ".join(names) or "none now"


def fetch_server_health(server: ServerRecord) -> dict[str, Any]:
    """Return what ``/health`` tells; nothing if the server does not answer."""
    try:
        url = f"{server.client_url}/health"
        with urllib.request.urlopen(url, timeout=HEALTH_TIMEOUT_SECONDS) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 has a body, too
        body = error.read()
    except (OSError, http.client.HTTPException):
        return {}
    try:
        health = json.loads(body)
    except ValueError:
        return {}
    return health if isinstance(health, dict) else {}


def format_duration(seconds: int) -> str:
    """Return 42 s, 12 min, 3 h 5 min or 2 d 4 h."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds} s"

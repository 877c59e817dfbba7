"""``modelmill stop``: ends running servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_json, print_note
from modelmill.core.config import option_field
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.server_records import ServerRecord, list_running_and_prune_stale

SILENT_WAIT_SECONDS = 1.0
"""Time to end after which the user learns what is waited for."""
HELP = "End a running server: running answers finish first."
EPILOG = """The server gets SIGTERM: new requests are refused, running answers may finish within its --shutdown-timeout.

Examples:

  modelmill stop smollm2

  modelmill stop http://127.0.0.1:8000

  modelmill stop --all"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill stop``."""

    server: str | None = option_field(
        None,
        "a served model, an address, a port or a process id",
        positional=True,
        complete=lambda: unambiguous_server_names(list_running_and_prune_stale()),
    )
    all: bool = option_field(False, "every server of this user", flags=("--all",))
    timeout: float = option_field(60.0, "seconds to wait until a server has ended")


def run(args: Args) -> int:
    """Send SIGTERM and wait; raises ModelmillError if a server does not end in time."""
    if args.all == (args.server is not None):
        raise UsageError("name one server, or give --all; modelmill ps lists them")
    if args.timeout < 0:
        raise UsageError(f"--timeout must be at least 0, not {args.timeout:g}")
    servers = list_running_and_prune_stale()
    chosen = servers if args.all else [find_server(servers, str(args.server))]
    for server in chosen:
        stop_server(server, args.timeout)
    if args.json:
        print_json([{"url": server.url, "models": list(server.models)} for server in chosen])
    else:
        for server in chosen:
            print_note(f"{server.url} ({', '.join(server.models)}) has ended")
        if not chosen:
            print_note("no server is running")
    return 0


def find_server(servers: Sequence[ServerRecord], name: str) -> ServerRecord:
    """Return the server of a model, address, port or process id.

    Raises:
        UsageError: if there is none, or a model is served by several.
    """
    plain = name.rstrip("/")
    found = [
        server
        for server in servers
        if plain
        in (*server.models, server.url, server.client_url, _server_port(server), str(server.pid))
    ]
    if len(found) > 1:
        urls = ", ".join(server.url for server in found)
        raise UsageError(f"{name} is served at {urls}; name one address")
    if not found:
        names = "; ".join(f"{', '.join(s.models)} at {s.url}" for s in servers)
        raise UsageError(
            f"no running server is, or serves, {name}; "
            + (f"there is {names}" if names else "none is running")
        )
    return found[0]


def unambiguous_server_names(servers: Sequence[ServerRecord]) -> list[str]:
    """Return the names that mean one server each: served models and ports."""
    models = [model for server in servers for model in server.models]
    return [*(each for each in models if models.count(each) == 1), *map(_server_port, servers)]


def _server_port(server: ServerRecord) -> str:
    return server.url.rpartition(":")[2]


def stop_server(server: ServerRecord, timeout: float) -> None:
    """End one server; one that has ended by itself is no error.

    Raises:
        ModelmillError: if it belongs to another user, or still runs after ``timeout`` seconds.
    """
    process = server.live_process()
    if process is None:
        return
    try:
        process.terminate()
        try:
            process.wait(min(timeout, SILENT_WAIT_SECONDS))
        except psutil.TimeoutExpired:
            if timeout <= SILENT_WAIT_SECONDS:
                raise
            print_note(f"{server.url} finishes its answers; waiting for at most {timeout:g} s")
            process.wait(timeout - SILENT_WAIT_SECONDS)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise ModelmillError(f"process {server.pid} belongs to another user") from None
    except psutil.TimeoutExpired:
        raise ModelmillError(
            f"{server.url} still finishes answers after {timeout:g} s; wait, or stop it again "
            "to end them"
        ) from None

"""The process of a rank above 0: loads its shard of the engine and runs rank 0's commands."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from modelmill.artifact.store import open_artifact
from modelmill.core import log
from modelmill.core.config import RunConfig, config_from_dict
from modelmill.core.errors import ModelmillError
from modelmill.parallel.rendezvous import connect_or_serve_store
from modelmill.parallel.tp_group import DistributedTPGroup
from modelmill.runtime.batch import BatchPacker
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.model_runner import ModelRunner
from modelmill.runtime.session_rank_transfer import run_session_command
from modelmill.runtime.sleep_mode import run_sleep_or_wake_command
from modelmill.runtime.tp_worker_pool import (
    COPY_PAGES_COMMAND,
    COPY_STATES_COMMAND,
    END_COMMAND,
    HEADER_BYTES,
    PING_COMMAND,
    SESSION_COMMANDS,
    SLEEP_AND_WAKE_COMMANDS,
    WorkerCommand,
)

_log = log.get_logger(__name__)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point; ``argv[1]``: the file descriptor of the socket to rank 0.

    Never returns: it exits without waiting for the process group.
    """
    link = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(
        target=_exit_with_parent, args=(link.fileno(), os.getppid()), daemon=True
    ).start()
    code = 1
    try:
        run_worker(link)
        code = 0
    except ModelmillError as error:
        _send(link, {"error": str(error)})
    except BaseException as error:
        _log.debug("%s", traceback.format_exc())
        first = str(error).splitlines()[0] if str(error) else ""
        _send(link, {"error": f"{type(error).__name__}: {first}"})
    os._exit(code)


def _set_parent_death_signal(parent: int) -> None:
    """Have the kernel kill this process when rank 0's ends, even while this one is stopped."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # rank 0 ended before the call


def run_worker(connection: socket.socket) -> None:
    """Load this rank's engine core and run commands until END_COMMAND or the end of the socket."""
    startup = _receive_startup(connection)
    if startup["bound"]:
        _set_parent_death_signal(startup["parent"])
    _send(connection, {"ready": True})
    rank = startup["rank"]
    size = startup["size"]
    device = startup["device"]
    tp_group = DistributedTPGroup(rank, size, connect_or_serve_store(startup["port"]), device)
    config = config_from_dict(RunConfig, startup["config"], "rank 0")
    core = EngineCore.load_for_rank(
        open_artifact(Path(startup["engine"]), staged=True), config, device, tp_group
    )
    run_commands(connection, core.model_runner)


def run_commands(connection: socket.socket, runner: ModelRunner) -> None:
    """Run rank 0's commands until END_COMMAND or the end of the socket."""
    header = bytearray(HEADER_BYTES)
    while _receive_into(connection, memoryview(header)):
        command = WorkerCommand.unpack(bytes(header))
        if command.command == END_COMMAND:
            return
        if command.command == PING_COMMAND:
            _send(connection, {"alive": True})
        elif command.command in SLEEP_AND_WAKE_COMMANDS:
            run_sleep_or_wake_command(runner, command.command)
        elif command.command in (COPY_PAGES_COMMAND, COPY_STATES_COMMAND, *SESSION_COMMANDS):
            words = np.empty(command.num_words, dtype=np.int64)
            if not _receive_into(connection, words.data.cast("B")):
                return
            _run_copy_or_session_command(runner, command.command, words)
        elif not _receive_and_run_step(connection, runner, runner.packer, command):
            return


def _run_copy_or_session_command(runner: ModelRunner, command: str, words: np.ndarray) -> None:
    """Copy pages or slots, as ``words`` say."""
    if command in SESSION_COMMANDS:
        run_session_command(runner, command, words.tolist())
        return
    copy = runner.copy_pages if command == COPY_PAGES_COMMAND else runner.copy_states
    copy([(int(a), int(b)) for a, b in words.reshape(-1, 2)])


def _receive_and_run_step(
    link: socket.socket, runner: ModelRunner, packer: BatchPacker, command: WorkerCommand
) -> bool:
    """Receive and run one step; False if rank 0 has ended."""
    views, buffer = packer.next_receive_buffer(command.layout)
    if not _receive_into(link, buffer):
        return False
    packer.upload(views)
    runner.run_step_command(command, command.batch(views))
    return True


def _receive_into(link: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer from the socket; False at its end."""
    received = 0
    while received < len(buffer):
        count = link.recv_into(buffer[received:])
        if not count:
            return False
        received += count
    return True


def _receive_startup(link: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte:
            os._exit(0)
        line += byte
    startup = json.loads(line)
    assert isinstance(startup, dict)
    return startup


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


def _exit_with_parent(link: int, parent: int) -> None:
    """Exit when rank 0 ends, even if the main thread waits for a collective that cannot end."""
    poll = select.poll()
    poll.register(link, select.POLLHUP)
    while True:
        if any(
            event & (select.POLLHUP | select.POLLERR | select.POLLNVAL)
            for _, event in poll.poll(1000)
        ):
            os._exit(0)
        if os.getppid() != parent:
            os._exit(0)

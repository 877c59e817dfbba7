"""The process of a rank above 0: it loads its part of the engine and runs the steps that rank 0 tells it to run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from modelmill.artifact.store import open_artifact
from modelmill.core import log
from modelmill.core.config import RunConfig, from_dict
from modelmill.core.errors import ModelmillError
from modelmill.parallel.meeting import join
from modelmill.parallel.mesh import Group
from modelmill.runtime.batch import Packer
from modelmill.runtime.loop import Loop
from modelmill.runtime.orders import COPY, END, HEADER, PING, Order
from modelmill.runtime.runner import Runner

_log = log.get(__name__)


def main() -> None:
    """``argv[1]``: the descriptor of the socket to rank 0. Never returns: what is left of a group is not waited for."""
    link = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_leave_with, args=(link.fileno(), os.getppid()), daemon=True).start()
    code = 1
    try:
        follow(link)
        code = 0
    except ModelmillError as error:
        _say(link, {"error": str(error)})
    except BaseException as error:
        _log.debug("%s", traceback.format_exc())
        first = str(error).splitlines()[0] if str(error) else ""
        _say(link, {"error": f"{type(error).__name__}: {first}"})
    os._exit(code)


def follow(link: socket.socket) -> None:
    """Until rank 0 says END or closes the link."""
    hello = _hello(link)
    _say(link, {"ready": True})
    rank, size, device = hello["rank"], hello["size"], hello["device"]
    mesh = Group(rank, size, join(hello["port"]), device)
    config = from_dict(RunConfig, hello["config"], "rank 0")
    loop = Loop.part(open_artifact(Path(hello["engine"]), staged=True), config, device, mesh)
    serve(link, loop.runner)


def serve(link: socket.socket, runner: Runner) -> None:
    """Run orders."""
    header = bytearray(HEADER)
    while _fill(link, memoryview(header)):
        order = Order.unpack(bytes(header))
        if order.kind == END:
            return
        if order.kind == PING:
            _say(link, {"alive": True})
        elif order.kind == COPY:
            pairs = np.empty(order.words, dtype=np.int64)
            if not _fill(link, pairs.data.cast("B")):
                return
            runner.copy_pages([(int(a), int(b)) for a, b in pairs.reshape(-1, 2)])
        elif not _step(link, runner, runner.packer, order):
            return


def _step(link: socket.socket, runner: Runner, packer: Packer, order: Order) -> bool:
    """One step; False where rank 0 is gone."""
    views, room = packer.take(order.layout)
    if not _fill(link, room):
        return False
    packer.send(views)
    runner.follow(order, order.batch(views))
    return True


def _fill(link: socket.socket, room: memoryview) -> bool:
    """Read exactly what fits; False at the end of the link."""
    got = 0
    while got < len(room):
        count = link.recv_into(room[got:])
        if not count:
            return False
        got += count
    return True


def _hello(link: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte:
            os._exit(0)
        line += byte
    hello = json.loads(line)
    assert isinstance(hello, dict)
    return hello


def _say(link: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(what).encode() + b"\n")


def _leave_with(link: int, parent: int) -> None:
    """End this process when rank 0 is gone, whatever it is waiting for: a GPU may wait for a sum that never comes."""
    poll = select.poll()
    poll.register(link, select.POLLHUP)
    while True:
        if any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(1000)):
            os._exit(0)
        if os.getppid() != parent:
            os._exit(0)

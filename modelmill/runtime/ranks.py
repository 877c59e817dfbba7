"""Several ranks, seen from rank 0, which lives in the caller's process: the others are started, told, watched, ended.

Rank 0 schedules and samples as if it were alone; before each step it sends the step's packed numbers to the others
(``orders``), which run the same step. A pair of connected sockets per rank carries the orders, and is how each side
learns that the other is gone: the kernel closes it, however a process ends.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelmill.core import env, log
from modelmill.core.config import RunConfig, to_dict
from modelmill.core.errors import ModelmillError, RankError
from modelmill.parallel.meeting import Meeting
from modelmill.parallel.mesh import Group, Mesh
from modelmill.runtime.orders import END, PING, Order

START_SECONDS = 300.0
_GRACE = 2.0  # seconds in which the end of a process becomes known after what it caused
_BLAME = 0.5  # seconds to see who of several ended first
_PACKAGES = Path(__file__).resolve().parent.parent.parent
_log = log.get(__name__)


class Crew:
    """The other ranks' processes."""

    def __init__(self, engine: Path, config: RunConfig, devices: list[str]) -> None:
        """Starts a process for each device but the first. Raises RankError where one does not come up."""
        self._mesh: Mesh | None = None
        self._failed: RankError | None = None
        self._closed = False
        self._stopping = threading.Lock()
        self._news = threading.Condition()
        self._ready = self._alive = 0
        self._meeting = Meeting()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        self._size, self._device = len(devices), devices[0]
        for rank in range(1, self._size):
            hello = {
                "rank": rank, "size": self._size, "port": self._meeting.port, "device": devices[rank],
                "engine": str(engine), "config": to_dict(config),
            }  # fmt: skip
            self._start(hello)
        self._ears = threading.Thread(target=self._watch, name="modelmill-ranks", daemon=True)
        self._ears.start()

    def meet(self) -> Mesh:
        """Wait until all ranks are up, and connect them."""
        with self._news:
            self._news.wait_for(lambda: self._failed or self._ready == self._size - 1, START_SECONDS)
            if not self._failed and self._ready < self._size - 1:
                self._failed = RankError(f"{self._size - 1 - self._ready} ranks did not start in {START_SECONDS:.0f} s")
        self.check()
        with self.guard():
            self._mesh = Group(0, self._size, self._meeting.store(), self._device)
        return self._mesh

    def tell(self, order: Order, words: memoryview | bytes = b"") -> None:
        """Send an order and what belongs to it to every rank. Raises RankError where one is gone."""
        self.check()
        header = order.pack()
        try:
            for link in self._links:
                sent = link.sendmsg((header, words))
                if sent < len(header) + len(words):
                    link.sendall((header + bytes(words))[sent:])
        except OSError:
            self.check(_GRACE)
            raise

    def ping(self) -> None:
        """Wait until every rank has answered, however long that takes: who watches this process ends it with them.

        Raises RankError where one is gone.
        """
        with self._news:
            self._alive = 0
        self.tell(Order(PING))
        with self._news:
            self._news.wait_for(lambda: self._failed or self._alive == self._size - 1)
        self.check()

    def check(self, wait: float = 0.0) -> None:
        """Raises RankError where a rank has ended; ``wait``: so many seconds for the news of it."""
        if wait:
            with self._news:
                self._news.wait_for(lambda: self._failed is not None, wait)
        if self._failed is not None:
            raise RankError(str(self._failed))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """What goes wrong inside because a rank has ended is told as that."""
        try:
            yield
        except ModelmillError:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.check(_GRACE)
            # the ranks may stand at different places now
            self.fail("a step was broken off on rank 0; open the engine again")
            raise
        self.check()

    def fail(self, reason: str) -> None:
        """End all ranks; every later call raises RankError with this reason."""
        with self._news:
            if self._failed is None:
                self._failed = RankError(reason)
            self._news.notify_all()
        self._end()

    def close(self) -> None:
        """End all ranks; closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.sendall(Order(END).pack())
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        if self._failed is None:
            self._failed = RankError("the engine was closed")
        self._end()
        # it ends with the first rank that does
        self._ears.join(_GRACE)
        for link in self._links:
            link.close()

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        # whoever comes second does not wait: ending a group takes its time where a GPU is busy
        if self._mesh is not None and self._stopping.acquire(blocking=False):
            self._mesh.stop()
        for process in self._processes:
            process.wait()

    def _start(self, hello: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path.insert(0, {str(_PACKAGES)!r}); from modelmill.runtime.follow import main; main()"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=env.worker(), start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        self._links.append(ours)
        ours.sendall(json.dumps(hello).encode() + b"\n")

    def _watch(self) -> None:
        """Hears what ranks say (that they are ready; why they end) until one of them ends."""
        with selectors.DefaultSelector() as ears:
            for rank, link in enumerate(self._links, 1):
                ears.register(link, selectors.EVENT_READ, rank)
            said = [b""] * self._size
            while not self._closed:
                for key, _ in ears.select():
                    heard = _read(self._links[key.data - 1])
                    *lines, said[key.data] = (said[key.data] + heard).split(b"\n")
                    words = [json.loads(line) for line in lines]
                    errors = [word.get("error") for word in words]
                    with self._news:
                        self._ready += sum("ready" in word for word in words)
                        self._alive += sum("alive" in word for word in words)
                        self._news.notify_all()
                    if not heard or any(errors):
                        self._learn(key.data, next(filter(None, errors), None))
                        return

    def _learn(self, rank: int, error: str | None) -> None:
        """A rank has ended. Where one was killed, the others' errors follow from that: it is the one to name."""
        deadline = time.monotonic() + _BLAME
        code = None
        while time.monotonic() < deadline and not self._closed:
            codes = [process.poll() for process in self._processes]
            killed = next((i for i, c in enumerate(codes, 1) if c is not None and c < 0), None)
            code = codes[rank - 1]
            if killed is not None:
                rank, error, code = killed, None, codes[killed - 1]
            if killed is not None or (error is None and code is not None):
                break
            time.sleep(0.01)
        if self._closed:
            return
        if error is None:
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        else:
            how = f"ended: {error}"
        self.fail(f"rank {rank} of {self._size} {how}; open the engine again")


def _read(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 16)
    except OSError:
        return b""

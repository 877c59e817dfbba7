"""An engine in a process of its own: requests come in over a socket, tokens go out over it.

Started by ``serve.child``; it ends when the other end of its socket is closed, however that came about, so no worker
outlives its server. What goes wrong inside a step ends the process: the server answers for it and starts another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from modelmill.artifact.store import Artifact, is_engine, open_artifact
from modelmill.artifact.verify import verify
from modelmill.core import heap
from modelmill.core.config import BuildConfig, RunConfig, from_dict
from modelmill.core.errors import ModelmillError, RequestError, UsageError
from modelmill.core.types import Request
from modelmill.language import Language
from modelmill.runtime.device import pick_device, prepare
from modelmill.runtime.loop import OUT_OF_MEMORY, Loop
from modelmill.runtime.memory import free_on_cpu
from modelmill.runtime.sequence import Sequence
from modelmill.serve import budget
from modelmill.serve.message import (
    HEAD,
    Abort,
    Add,
    Ask,
    Begun,
    Count,
    End,
    Failed,
    Heartbeat,
    Loading,
    Message,
    Open,
    Ping,
    Ready,
    Refused,
    Told,
    decode,
    encode,
)
from modelmill.serve.pictures import KIND
from modelmill.serve.watchdog import turn
from modelmill.text.grammar import Guide

BUFFER = 4 << 20
LOST = 3
"""Exit code of a worker whose server is gone."""
NO_ROOM = "the engine has no memory left for this request; send fewer or smaller inputs, or try again soon"


class Wire:
    """The worker's end of the socket: blocking, one thread reads, and messages of any go out whole."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._sock = sock
        self._file = sock.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Blocks while the server does not read: the engine is to run no further ahead than that."""
        data = encode(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None when the server is gone."""
        try:
            head = self._file.read(HEAD.size)
            body = self._file.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else b""
        except (OSError, ValueError):
            return None
        return decode(body) if body else None


class Pulse:
    """Called while a long step goes on: sends a Heartbeat now and then, so that it is not taken for one that hangs."""

    def __init__(self, send: Callable[[Message], None], seconds: float) -> None:
        """seconds: between two of them."""
        self._send, self._seconds, self._last = send, seconds, time.monotonic()

    def __call__(self) -> None:
        """An operation has ended."""
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            with contextlib.suppress(OSError):  # a server that is gone is noticed elsewhere
                self._send(Heartbeat())


@dataclass(frozen=True)
class Come:
    """A request and when it came, by time.perf_counter; its grammar is ready, or one line says why it cannot be."""

    request: Request
    when: float
    guide: Guide | None = None
    problem: str = ""


class Inbox:
    """Reads the wire on a thread of its own, so that a server that is gone is noticed whatever the engine does.

    Grammars are made ready on another thread, so that they stop no step. ``prepare`` is given once the engine is open.
    While it is ``opening``, this thread answers for the process that it lives; later the engine's own does.
    """

    def __init__(self, wire: Wire, lost: Callable[[], None], opening: bool = False) -> None:
        """lost: called once the server is gone; after it, ``messages`` ends with None."""
        self.messages: queue.SimpleQueue[Message | Come | None] = queue.SimpleQueue()
        self.prepare: Callable[[Request], Guide] | None = None
        self.opening = opening
        self._wire, self._lost = wire, lost
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-grammar")
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="modelmill-worker-in", daemon=True).start()

    def _listen(self) -> None:
        while (message := self._wire.receive()) is not None:
            if isinstance(message, Add):
                come = Come(message.request, time.perf_counter())
                if message.request.grammar is None:
                    self.messages.put(come)
                else:
                    self._pending.add(message.request.id)
                    self._pool.submit(self._make, come)
                continue
            if isinstance(message, Ping) and self.opening:
                with contextlib.suppress(OSError):
                    self._wire.send(Heartbeat())
                continue
            with self._lock:
                if isinstance(message, Abort):
                    self._pending.discard(message.id)
                self.messages.put(message)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lost()
        self.messages.put(None)

    def _make(self, come: Come) -> None:
        request = come.request
        if request.id not in self._pending:
            return
        guide, problem = None, ""
        try:
            if self.prepare is None:
                raise RequestError("this engine was opened without structured output")
            guide = self.prepare(request)
        except ModelmillError as error:
            problem = str(error)
        except Exception as error:
            # nobody looks at this thread: its request would wait for ever
            problem = f"its grammar cannot be made ready: {type(error).__name__}"
        with self._lock:
            # an abort that came meanwhile has taken it away
            if request.id in self._pending:
                self._pending.discard(request.id)
                self.messages.put(replace(come, guide=guide, problem=problem))


class Worker:
    """Steps a loop for as long as its server is there."""

    def __init__(self, loop: Loop, wire: Wire, inbox: Inbox) -> None:
        self.loop, self._wire, self._inbox = loop, wire, inbox
        self._queued: deque[tuple[float, Sequence]] = deque()

    def run(self) -> None:
        """Until the server is gone."""
        loop, inbox = self.loop, self._inbox.messages
        try:
            while True:
                while not (loop.has_work and inbox.empty()):
                    message = inbox.get()
                    if message is None:
                        return
                    self._obey(message)
                tokens = loop.step()
                if self._queued:
                    self._begun()
                if tokens:
                    self._wire.send(Told(tokens))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _add(self, come: Come) -> None:
        request, guide = come.request, come.guide
        self.loop.entry.guides = None if guide is None else lambda _: guide.copy()
        try:
            if come.problem:
                raise RequestError(come.problem)
            self.loop.add(request)
        except RequestError as error:
            self._wire.send(Refused(request.id, str(error)))
            return
        except OUT_OF_MEMORY:
            # no step was under way: its pictures were read, or its prompt was taken in, and nothing of it is left
            self._wire.send(Refused(request.id, NO_ROOM, memory=True))
            return
        # the object itself: a request that ends in its first step is live no more once that has been told
        self._queued.append((come.when, self.loop.ledger.live[request.id][0]))

    def _begun(self) -> None:
        """Tell which requests have left the queue: in order, so the first that waits ends the search."""
        while self._queued:
            came, seq = self._queued[0]
            if seq.began is None and seq.finish is None:
                return
            self._queued.popleft()
            if seq.began is not None:
                self._wire.send(Begun(seq.request.id, round(seq.began - came, 6)))

    def _obey(self, message: Message | Come) -> None:
        if isinstance(message, Come):
            self._add(message)
        elif isinstance(message, Abort):
            self.loop.abort(message.id)
        elif isinstance(message, End):
            self.loop.finish(message.id, message.index)
        elif isinstance(message, Ask):
            self._wire.send(Count(message.number, asdict(self.loop.stats())))
        elif isinstance(message, Ping):
            self.loop.ping()
            self._wire.send(Heartbeat())


def ready(loop: Loop, path: str) -> Ready:
    """What the server has to know of an open loop."""
    bounds = loop.bounds
    return Ready(
        path, loop.device, bounds.vocab, bounds.longest, loop.num_pages, loop.page_size, loop.page_bytes, bounds.seqs,
        kept_pages=loop.scheduler.pool.kept,
    )  # fmt: skip


def artifact_of(order: Open, told: Callable[[str, int, int], None]) -> Artifact:
    """The engine, checked; a checkpoint is built into the cache first. Raises ModelmillError."""
    path = Path(order.model)
    # a folder that is called an engine is told what it lacks of one, not of a checkpoint
    if not is_engine(path) and not (path.is_dir() and path.suffix == ".engine"):
        if not path.exists():
            raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
        from modelmill.llm import cached_engine

        path = cached_engine(path, from_dict(BuildConfig, order.build, "build"), told, None)
    elif order.build:
        raise UsageError(f"{', '.join(order.build)}: decided when an engine is built, and {path} is one already")
    artifact = open_artifact(path)
    verify(artifact, progress=lambda done, total: told("checking", done, total))
    return _Watched(artifact, told)


def opened(order: Open, artifact: Artifact, told: Callable[[str, int, int], None]) -> Loop:
    """The loop of an engine that writes text. Raises ModelmillError."""
    config = _budgeted(from_dict(RunConfig, order.run, "run"), artifact.nbytes(), order)
    loop = Loop.open(artifact, config)
    loop.scheduler.interactive(config.max_mixed_tokens, on_gpu=loop.device != "cpu")
    if order.warm:
        told("warming up", 0, 1)
        loop.warm_up(forms=True)
    return loop


def view(order: Open, artifact: Artifact, wire: Wire, inbox: Inbox) -> None:
    """Answer for an engine that segments, until the server is gone. Raises ModelmillError."""
    from modelmill.serve import viewer

    eye = viewer.opened(order, artifact)
    if order.watchdog and eye.device.type == "cpu":
        eye.beat_with(Pulse(wire.send, turn(order.watchdog)))
    inbox.opening = False
    wire.send(viewer.ready(eye, str(artifact.path)))
    viewer.Viewer(eye, wire, inbox, order.most_pixels).run()


class _Preparing:
    """Makes guides. The vocabulary is read when the first one is asked for: most servers never need it."""

    def __init__(self, path: Path, template: str | None, vocab: int) -> None:
        self._path, self._template, self._vocab = path, template, vocab
        self._language: Language | None = None

    def __call__(self, request: Request) -> Guide:
        if self._language is None:
            self._language = Language.read(self._path, self._template)
        return self._language.guide(request, self._vocab)


def _budgeted(config: RunConfig, mine: int, order: Open) -> RunConfig:
    """``config`` with this engine's part of the memory."""
    device = pick_device(config.device)
    if device == "cpu":
        beside = order.earlier + len(order.others)
        return budget.on_cpu(config, free_on_cpu(config.tp, order.aside), beside, order.aside)
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return budget.on_cuda(config, free, total, mine, order.others, order.aside)


class _Watched(Artifact):
    """An artifact that tells how many of its bytes have been read."""

    def __init__(self, artifact: Artifact, told: Callable[[str, int, int], None]) -> None:
        super().__init__(artifact.path, artifact.manifest)
        self._told, self._done, self._total = told, 0, artifact.nbytes()

    def tensor(self, name: str) -> Any:
        found = super().tensor(name)
        self._done += found.numel() * found.element_size()
        self._told("loading", min(self._done, self._total), self._total)
        return found


def _progress(wire: Wire, seconds: float = 0.1) -> Callable[[str, int, int], None]:
    """Sends Loading, at most every ``seconds`` for each stage."""
    last: dict[str, float] = {}

    def told(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(stage, 0.0) >= seconds or done >= total:
            last[stage] = now
            wire.send(Loading(stage, done, total))

    return told


def _announce(told: Callable[[str, int, int], None], stage: str, done: int, total: int) -> None:
    """Tell the server, and who reads the terminal or the log: it takes long and comes before all else."""
    sys.stderr.write(f"modelmill: {stage}\n")
    told(stage, done, total)


def main(argv: list[str]) -> int:
    """``python -m modelmill.serve.worker FD``."""
    # whoever started the server tells the server; it tells us by closing the socket
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    heap.keep_freed()
    wire = Wire(socket.socket(fileno=int(argv[0])))
    order = wire.receive()
    if not isinstance(order, Open):
        return LOST
    inbox = Inbox(wire, lost=lambda: os._exit(LOST), opening=True)
    try:
        told = _progress(wire)
        prepare(str(order.run.get("device", "auto")), partial(_announce, told))
        artifact = artifact_of(order, told)
        if artifact.manifest.kind == KIND:
            view(order, artifact, wire, inbox)
            return LOST
        loop, path = opened(order, artifact, told), str(artifact.path)
    except ModelmillError as error:
        wire.send(Failed(str(error), isinstance(error, UsageError)))
        return 1
    except BrokenPipeError:
        return LOST
    inbox.prepare = _Preparing(Path(path), order.template, loop.vocab)
    if order.watchdog and loop.device == "cpu":
        # a GPU's steps are short, and its kernels are only launched here
        loop.beat_with(Pulse(wire.send, turn(order.watchdog)))
    inbox.opening = False
    wire.send(ready(loop, path))
    Worker(loop, wire, inbox).run()
    return LOST


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

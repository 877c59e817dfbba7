"""An engine in a process of its own: requests come in over a socket, tokens go out over it.

Started by ``serve.worker_process``; it ends when the other end of its socket is closed, however
that came about, so no worker outlives its server. What goes wrong inside a step ends the process;
the server starts another.
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
from modelmill.core import malloc
from modelmill.core.config import BuildConfig, RunConfig, from_dict
from modelmill.core.errors import ModelmillError, RequestError, UsageError
from modelmill.core.types import Request
from modelmill.runtime.device import compile_cpu_kernels, pick_device
from modelmill.runtime.engine_core import OUT_OF_MEMORY_ERRORS, EngineCore
from modelmill.runtime.kv_memory import free_cpu_bytes
from modelmill.runtime.sequence import Sequence
from modelmill.serve import budget
from modelmill.serve.segment_messages import SEGMENTATION
from modelmill.serve.watchdog import poll_interval
from modelmill.serve.worker_messages import (
    LENGTH_PREFIX,
    AbortRequest,
    AddRequest,
    EngineReady,
    FinishSequence,
    GetStats,
    Heartbeat,
    LoadingUpdate,
    Message,
    OpenEngine,
    OpenFailed,
    Ping,
    RequestRejected,
    RequestStarted,
    StatsReply,
    StepTokens,
    decode,
    encode,
)
from modelmill.text.grammar import GrammarGuide
from modelmill.text_processor import TextProcessor

SEND_BUFFER_BYTES = 4 << 20
EXIT_SERVER_GONE = 3
"""Exit code of a worker whose server is gone."""
OUT_OF_MEMORY_MESSAGE = (
    "the engine has no memory left for this request; send fewer or smaller "
    "inputs, or try again soon"
)


class MessageChannel:
    """The worker's end of the socket: blocking, one thread reads, and messages of any go out
    whole.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock = sock
        self._file = sock.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Blocks while the server does not read: the engine is to run no further ahead than
        that.
        """
        data = encode(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None when the server is gone."""
        try:
            head = self._file.read(LENGTH_PREFIX.size)
            body = (
                self._file.read(LENGTH_PREFIX.unpack(head)[0])
                if len(head) == LENGTH_PREFIX.size
                else b""
            )
        except (OSError, ValueError):
            return None
        return decode(body) if body else None


class HeartbeatSender:
    """Called while a long step goes on: sends a Heartbeat now and then, so that it is not taken for
    one that hangs.
    """

    def __init__(self, send: Callable[[Message], None], interval: float) -> None:
        """interval: seconds between two of them."""
        self._send, self._interval, self._last = send, interval, time.monotonic()

    def __call__(self) -> None:
        """An operation has ended."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            with contextlib.suppress(OSError):  # a server that is gone is noticed elsewhere
                self._send(Heartbeat())


@dataclass(frozen=True)
class Arrival:
    """A request and when it came, by time.perf_counter; its grammar is ready, or one line says why
    it cannot be.
    """

    request: Request
    arrived_at: float
    guide: GrammarGuide | None = None
    error: str = ""


class Inbox:
    """Reads the channel on a thread of its own, so that a server that is gone is noticed whatever
    the engine does.

    Grammars are made ready on another thread, so that they stop no step; ``make_guide`` is set once
    the engine is open. While it is ``is_opening``, this thread answers for the process that it
    lives; later the engine's own does.
    """

    def __init__(
        self, channel: MessageChannel, on_server_gone: Callable[[], None], is_opening: bool = False
    ) -> None:
        """on_server_gone: called once it is; after that, ``messages`` ends with None."""
        self.messages: queue.SimpleQueue[Message | Arrival | None] = queue.SimpleQueue()
        self.make_guide: Callable[[Request], GrammarGuide] | None = None
        self.is_opening = is_opening
        self._channel, self._on_server_gone = channel, on_server_gone
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-grammar")
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="modelmill-worker-in", daemon=True).start()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, AddRequest):
                come = Arrival(message.request, time.perf_counter())
                if message.request.grammar is None:
                    self.messages.put(come)
                else:
                    self._pending.add(message.request.id)
                    self._pool.submit(self._prepare_guide, come)
                continue
            if isinstance(message, Ping) and self.is_opening:
                with contextlib.suppress(OSError):
                    self._channel.send(Heartbeat())
                continue
            with self._lock:
                if isinstance(message, AbortRequest):
                    self._pending.discard(message.id)
                self.messages.put(message)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._on_server_gone()
        self.messages.put(None)

    def _prepare_guide(self, arrival: Arrival) -> None:
        request = arrival.request
        if request.id not in self._pending:
            return
        guide, problem = None, ""
        try:
            if self.make_guide is None:
                raise RequestError("this engine was opened without structured output")
            guide = self.make_guide(request)
        except ModelmillError as error:
            problem = str(error)
        except Exception as error:
            # nobody looks at this thread: its request would wait for ever
            problem = f"its grammar cannot be made ready: {type(error).__name__}"
        with self._lock:
            # an abort that came meanwhile has taken it away
            if request.id in self._pending:
                self._pending.discard(request.id)
                self.messages.put(replace(arrival, guide=guide, error=problem))


class EngineWorker:
    """Steps an engine core for as long as its server is there."""

    def __init__(self, engine_core: EngineCore, channel: MessageChannel, inbox: Inbox) -> None:
        self.engine_core, self._channel, self._inbox = engine_core, channel, inbox
        self._unstarted: deque[tuple[float, Sequence]] = deque()

    def run(self) -> None:
        """Until the server is gone."""
        loop, inbox = self.engine_core, self._inbox.messages
        try:
            while True:
                while not (loop.has_work and inbox.empty()):
                    message = inbox.get()
                    if message is None:
                        return
                    self._handle(message)
                tokens = loop.step()
                if self._unstarted:
                    self._report_started()
                if tokens:
                    self._channel.send(StepTokens(tokens))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _add_request(self, arrival: Arrival) -> None:
        request, guide = arrival.request, arrival.guide
        self.engine_core.input_processor.guide_factory = (
            None if guide is None else lambda _: guide.copy()
        )
        try:
            if arrival.error:
                raise RequestError(arrival.error)
            self.engine_core.add(request)
        except RequestError as error:
            self._channel.send(RequestRejected(request.id, str(error)))
            return
        except OUT_OF_MEMORY_ERRORS:
            # no step was under way: its pictures were read, or its prompt was taken in, and nothing
            # of it is left
            self._channel.send(
                RequestRejected(request.id, OUT_OF_MEMORY_MESSAGE, out_of_memory=True)
            )
            return
        # the object itself: a request that ends in its first step is live no more once that has
        # been told
        self._unstarted.append(
            (arrival.arrived_at, self.engine_core.output_processor.live_sequences[request.id][0])
        )

    def _report_started(self) -> None:
        """Tell which requests have left the queue: in order, so the first that waits ends the
        search.
        """
        while self._unstarted:
            came, seq = self._unstarted[0]
            if seq.started_at is None and seq.finish_reason is None:
                return
            self._unstarted.popleft()
            if seq.started_at is not None:
                self._channel.send(RequestStarted(seq.request.id, round(seq.started_at - came, 6)))

    def _handle(self, message: Message | Arrival) -> None:
        if isinstance(message, Arrival):
            self._add_request(message)
        elif isinstance(message, AbortRequest):
            self.engine_core.abort(message.id)
        elif isinstance(message, FinishSequence):
            self.engine_core.finish(message.id, message.index)
        elif isinstance(message, GetStats):
            self._channel.send(StatsReply(message.number, asdict(self.engine_core.stats())))
        elif isinstance(message, Ping):
            self.engine_core.ping()
            self._channel.send(Heartbeat())


def ready_message(engine_core: EngineCore, path: str) -> EngineReady:
    """What the server has to know of an open engine core."""
    limits = engine_core.request_limits
    return EngineReady(
        path,
        engine_core.device,
        limits.vocab_size,
        limits.max_len,
        engine_core.num_pages,
        engine_core.page_size,
        engine_core.page_bytes,
        limits.max_seqs,
        max_prefix_pages=engine_core.scheduler.pool.max_idle,
    )


def open_or_build_artifact(
    open_engine: OpenEngine, on_progress: Callable[[str, int, int], None]
) -> Artifact:
    """The engine, checked; a checkpoint is built into the cache first. Raises ModelmillError."""
    path = Path(open_engine.model)
    # a folder that is called an engine is told what it lacks of one, not of a checkpoint
    if not is_engine(path) and not (path.is_dir() and path.suffix == ".engine"):
        if not path.exists():
            raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
        from modelmill.llm import cached_engine

        path = cached_engine(
            path, from_dict(BuildConfig, open_engine.build, "build"), on_progress, None
        )
    elif open_engine.build:
        raise UsageError(
            f"{', '.join(open_engine.build)}: decided when an engine is built, and {path} is one "
            "already"
        )
    artifact = open_artifact(path)
    verify(artifact, on_progress=lambda done, total: on_progress("checking", done, total))
    return _ProgressArtifact(artifact, on_progress)


def load_engine_core(
    open_engine: OpenEngine, artifact: Artifact, on_progress: Callable[[str, int, int], None]
) -> EngineCore:
    """The engine core of an engine that writes text. Raises ModelmillError."""
    config = _with_memory_budget(
        from_dict(RunConfig, open_engine.run, "run"), artifact.nbytes(), open_engine
    )
    loop = EngineCore.open(artifact, config)
    loop.scheduler.set_interactive(config.max_mixed_tokens, on_gpu=loop.device != "cpu")
    if open_engine.warm_up:
        on_progress("warming up", 0, 1)
        loop.warm_up(all_specializations=True)
    return loop


def sends_op_heartbeats(open_engine: OpenEngine, device: str) -> bool:
    """Whether operations of a step are signs of life.

    A GPU's steps are short, and its kernels are only launched here; but where nothing is warmed up
    the first ones compile, one operation after another.
    """
    return open_engine.watchdog_seconds > 0 and (device == "cpu" or not open_engine.warm_up)


def run_segment_worker(
    open_engine: OpenEngine, artifact: Artifact, channel: MessageChannel, inbox: Inbox
) -> None:
    """Answer for an engine that segments, until the server is gone. Raises ModelmillError."""
    from modelmill.serve import segment_worker

    eye = segment_worker.load_sam(open_engine, artifact)
    if open_engine.watchdog_seconds and eye.device.type == "cpu":
        eye.on_heartbeat(HeartbeatSender(channel.send, poll_interval(open_engine.watchdog_seconds)))
    inbox.is_opening = False
    channel.send(segment_worker.ready_message(eye, str(artifact.path)))
    segment_worker.SegmentWorker(eye, channel, inbox, open_engine.max_pixels).run()


class _GuideFactory:
    """Makes guides.

    The vocabulary is read when the first one is asked for: most servers never need it.
    """

    def __init__(self, path: Path, chat_template: str | None, vocab_size: int) -> None:
        self._path, self._chat_template, self._vocab_size = path, chat_template, vocab_size
        self._text_processor: TextProcessor | None = None

    def __call__(self, request: Request) -> GrammarGuide:
        if self._text_processor is None:
            self._text_processor = TextProcessor.from_engine(self._path, self._chat_template)
        return self._text_processor.make_guide(request, self._vocab_size)


def _with_memory_budget(config: RunConfig, weight_bytes: int, open_engine: OpenEngine) -> RunConfig:
    """``config`` with this engine's part of the memory."""
    device = pick_device(config.device)
    if device == "cpu":
        beside = open_engine.num_loaded_before + len(open_engine.later_weight_bytes)
        return budget.with_cpu_budget(
            config,
            free_cpu_bytes(config.tp, open_engine.segment_bytes),
            beside,
            open_engine.segment_bytes,
        )
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return budget.with_cuda_budget(
        config, free, total, weight_bytes, open_engine.later_weight_bytes, open_engine.segment_bytes
    )


class _ProgressArtifact(Artifact):
    """An artifact that tells how many of its bytes have been read."""

    def __init__(self, artifact: Artifact, on_progress: Callable[[str, int, int], None]) -> None:
        super().__init__(artifact.path, artifact.manifest)
        self._on_progress, self._done_bytes, self._total_bytes = on_progress, 0, artifact.nbytes()

    def tensor(self, name: str) -> Any:
        found = super().tensor(name)
        self._done_bytes += found.numel() * found.element_size()
        self._on_progress("loading", min(self._done_bytes, self._total_bytes), self._total_bytes)
        return found


def _loading_reporter(
    channel: MessageChannel, seconds: float = 0.1
) -> Callable[[str, int, int], None]:
    """Sends LoadingUpdate, at most every ``seconds`` for each stage."""
    last: dict[str, float] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(stage, 0.0) >= seconds or done >= total:
            last[stage] = now
            channel.send(LoadingUpdate(stage, done, total))

    return on_progress


def _announce(
    on_progress: Callable[[str, int, int], None], stage: str, done: int, total: int
) -> None:
    """Tell the server, and who reads the terminal or the log: it takes long and comes before all
    else.
    """
    sys.stderr.write(f"modelmill: {stage}\n")
    on_progress(stage, done, total)


def main(argv: list[str]) -> int:
    """``python -m modelmill.serve.worker FD``."""
    # whoever started the server tells the server; it tells us by closing the socket
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    malloc.set_malloc_thresholds()
    wire = MessageChannel(socket.socket(fileno=int(argv[0])))
    order = wire.receive()
    if not isinstance(order, OpenEngine):
        return EXIT_SERVER_GONE
    inbox = Inbox(wire, on_server_gone=lambda: os._exit(EXIT_SERVER_GONE), is_opening=True)
    try:
        told = _loading_reporter(wire)
        compile_cpu_kernels(str(order.run.get("device", "auto")), partial(_announce, told))
        artifact = open_or_build_artifact(order, told)
        if artifact.manifest.engine_type == SEGMENTATION:
            run_segment_worker(order, artifact, wire, inbox)
            return EXIT_SERVER_GONE
        loop, path = load_engine_core(order, artifact, told), str(artifact.path)
    except ModelmillError as error:
        wire.send(OpenFailed(str(error), isinstance(error, UsageError)))
        return 1
    except BrokenPipeError:
        return EXIT_SERVER_GONE
    inbox.make_guide = _GuideFactory(Path(path), order.chat_template, loop.vocab)
    if sends_op_heartbeats(order, loop.device):
        loop.on_heartbeat(HeartbeatSender(wire.send, poll_interval(order.watchdog_seconds)))
    inbox.is_opening = False
    wire.send(ready_message(loop, path))
    EngineWorker(loop, wire, inbox).run()
    return EXIT_SERVER_GONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

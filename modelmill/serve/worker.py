"""The worker process of one engine: requests arrive over a socket, tokens leave over it.

Started by ``serve.worker_process``. It exits when the other end of its socket is closed, so no
worker outlives its server. An error inside a step ends the process; the server starts another.
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
from modelmill.core.progress import Progress
from modelmill.core.types import Guide, Request
from modelmill.loader.cache_split import split_cache_bytes
from modelmill.loader.capacity import cpu_kv_cache_budget
from modelmill.loader.device import compile_cpu_kernels, pick_device
from modelmill.runtime.engine_core import OUT_OF_MEMORY_ERRORS, EngineCore
from modelmill.runtime.sequence import Sequence
from modelmill.serve import budget
from modelmill.serve.segment_messages import SEGMENTATION
from modelmill.serve.session_worker import LoadedSession, SessionWorker
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
    RestoreSession,
    SaveSession,
    StatsReply,
    StepTokens,
    decode,
    encode,
)
from modelmill.text_processor import TextProcessor

SEND_BUFFER_BYTES = 4 << 20
EXIT_SERVER_GONE = 3
"""Exit code of a worker whose server is gone."""
OUT_OF_MEMORY_MESSAGE = (
    "the engine has no memory left for this request; send fewer or smaller "
    "inputs, or try again soon"
)


class MessageChannel:
    """The worker's end of the socket: blocking; one thread reads, any thread may send.

    Messages of several threads are never interleaved.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock = sock
        self._file = sock.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message.

        Blocks while the server does not read, so the engine cannot run far ahead of it.
        """
        data = encode(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Message | None:
        """Return the next message; None when the server is gone."""
        try:
            prefix = self._file.read(LENGTH_PREFIX.size)
            body = (
                self._file.read(LENGTH_PREFIX.unpack(prefix)[0])
                if len(prefix) == LENGTH_PREFIX.size
                else b""
            )
        except (OSError, ValueError):
            return None
        return decode(body) if body else None


class HeartbeatSender:
    """Sends a Heartbeat at intervals during a long step, which would look like a hang otherwise."""

    def __init__(self, send: Callable[[Message], None], interval: float) -> None:
        """Remember where to send.

        Args:
            send: sends a message.
            interval: seconds between two heartbeats.
        """
        self._send = send
        self._interval = interval
        self._last = time.monotonic()

    def __call__(self) -> None:
        """Called after each op: send a Heartbeat if it is due."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            with contextlib.suppress(OSError):  # the reader thread notices a lost server
                self._send(Heartbeat())


@dataclass(frozen=True)
class Arrival:
    """A received request, its guide and its time of arrival (time.perf_counter).

    Attributes:
        request: as received.
        arrived_at: seconds.
        guide: of its grammar; None without one.
        error: one line saying why the grammar cannot be compiled; empty if it can.
    """

    request: Request
    arrived_at: float
    guide: Guide | None = None
    error: str = ""


class Inbox:
    """Reads the channel on its own thread, which notices a lost server while the engine is busy.

    Grammars are compiled on another thread, so that they delay no step. While the engine is being
    opened, the reader thread answers a Ping; after ``finish_opening`` the engine's thread does.
    """

    def __init__(
        self, channel: MessageChannel, on_server_gone: Callable[[], None], is_opening: bool = False
    ) -> None:
        """Start the reader thread.

        Args:
            channel: to read from.
            on_server_gone: called once the server is gone; ``messages`` then ends with None.
            is_opening: the engine is still being opened.
        """
        self.messages: queue.SimpleQueue[Message | Arrival | LoadedSession | None] = (
            queue.SimpleQueue()
        )
        self._make_guide: Callable[[Request], Guide] | None = None
        self._is_opening = is_opening
        self._channel, self._on_server_gone = channel, on_server_gone
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-grammar")
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="modelmill-worker-in", daemon=True).start()

    def accept_grammars(self, make_guide: Callable[[Request], Guide]) -> None:
        """Make guides with ``make_guide`` from now on; without it, grammars are refused."""
        self._make_guide = make_guide

    def finish_opening(self) -> None:
        """The engine is open: its thread answers a Ping from now on."""
        self._is_opening = False

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, AddRequest):
                arrival = Arrival(message.request, time.perf_counter())
                if message.request.grammar is None:
                    self.messages.put(arrival)
                else:
                    self._pending.add(message.request.id)
                    self._pool.submit(self._prepare_guide, arrival)
                continue
            if isinstance(message, Ping) and self._is_opening:
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
        guide, message = None, ""
        try:
            if self._make_guide is None:
                raise RequestError("this engine was opened without structured output")
            guide = self._make_guide(request)
        except ModelmillError as error:
            message = str(error)
        except Exception as error:
            # an exception would be lost in this thread and the request would wait forever
            message = f"its grammar cannot be made ready: {type(error).__name__}"
        with self._lock:
            # an abort may have removed it meanwhile
            if request.id in self._pending:
                self._pending.discard(request.id)
                self.messages.put(replace(arrival, guide=guide, error=message))


class EngineWorker:
    """Steps an engine core until its server is gone."""

    def __init__(self, engine_core: EngineCore, channel: MessageChannel, inbox: Inbox) -> None:
        self.engine_core = engine_core
        self._channel = channel
        self._inbox = inbox
        self._unstarted: deque[tuple[float, Sequence]] = deque()
        self._in_order = True
        self._sessions = SessionWorker(engine_core, channel.send, inbox.messages.put)

    def run(self) -> None:
        """Process messages and run steps until the server is gone."""
        core, inbox = self.engine_core, self._inbox.messages
        try:
            while True:
                while not (core.has_work and inbox.empty()):
                    message = inbox.get()
                    if message is None:
                        return
                    self._handle(message)
                tokens = core.step()
                if self._unstarted:
                    self._report_started()
                if tokens:
                    self._channel.send(StepTokens(tokens))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _add_request(self, arrival: Arrival) -> None:
        request, guide = arrival.request, arrival.guide
        make_guide = None if guide is None else lambda _: guide.copy()
        try:
            if arrival.error:
                raise RequestError(arrival.error)
            self.engine_core.add(request, make_guide)
        except RequestError as error:
            self._channel.send(RequestRejected(request.id, str(error)))
            return
        except OUT_OF_MEMORY_ERRORS:
            # out of memory while images or the prompt were prepared, outside a step: nothing of
            # the request remains
            self._channel.send(
                RequestRejected(request.id, OUT_OF_MEMORY_MESSAGE, out_of_memory=True)
            )
            return
        # keep the sequence itself: a request that finishes in its first step has already left
        # ``live_sequences`` when its start is reported
        seq = self.engine_core.output_processor.live_sequences[request.id][0]
        self._in_order &= not self._unstarted or self._unstarted[-1][1].priority < seq.priority
        self._unstarted.append((arrival.arrived_at, seq))

    def _report_started(self) -> None:
        """Send RequestStarted for sequences that have left the queue.

        While they were queued in the order in which they start, the first that still waits ends the
        search.
        """
        waiting: deque[tuple[float, Sequence]] = deque()
        while self._unstarted:
            arrived_at, seq = self._unstarted[0]
            if seq.started_at is None and seq.finish_reason is None:
                if self._in_order:
                    return
                waiting.append(self._unstarted.popleft())
                continue
            self._unstarted.popleft()
            if seq.started_at is not None:
                self._channel.send(
                    RequestStarted(seq.request.id, round(seq.started_at - arrived_at, 6))
                )
        self._unstarted, self._in_order = waiting, not waiting

    def _handle(self, message: Message | Arrival | LoadedSession) -> None:
        if isinstance(message, Arrival):
            self._add_request(message)
        elif isinstance(message, AbortRequest):
            self.engine_core.abort(message.id)
        elif isinstance(message, FinishSequence):
            self.engine_core.finish_on_stop_string(message.id, message.index)
        elif isinstance(message, GetStats):
            self._channel.send(StatsReply(message.number, asdict(self.engine_core.stats())))
        elif isinstance(message, Ping):
            self.engine_core.ping()
            self._channel.send(Heartbeat())
        elif isinstance(message, SaveSession):
            self._sessions.save(message)
        elif isinstance(message, RestoreSession):
            self._sessions.restore(message)
        elif isinstance(message, LoadedSession):
            self._sessions.finish_restore(message)


def ready_message(engine_core: EngineCore, path: str) -> EngineReady:
    """Describe an open engine core to the server."""
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
        state_cache_bytes=engine_core.state_cache_bytes,
        kv_tokens=limits.kv_tokens,
    )


def open_or_build_artifact(open_engine: OpenEngine, on_progress: Progress) -> Artifact:
    """Open and verify the engine; a checkpoint is first built into the cache.

    Raises:
        ModelmillError: the engine cannot be opened or built.
    """
    path = Path(open_engine.model)
    # a folder named *.engine gets the error message of an engine, not of a checkpoint
    if not is_engine(path) and not (path.is_dir() and path.suffix == ".engine"):
        if not path.exists():
            raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
        from modelmill.llm import cached_engine

        path = cached_engine(
            path, from_dict(BuildConfig, open_engine.build, "build"), on_progress, None
        )
    elif open_engine.build:
        raise UsageError(
            f"{', '.join(open_engine.build)}: options of a build, and {path} is already built"
        )
    artifact = open_artifact(path)
    verify(artifact, on_progress=on_progress)
    return _ProgressArtifact(artifact, on_progress)


def load_engine_core(
    open_engine: OpenEngine, artifact: Artifact, on_progress: Progress
) -> EngineCore:
    """Load the engine core of an engine that generates text.

    Raises:
        ModelmillError: the engine cannot be loaded.
    """
    config = _with_memory_budget(
        from_dict(RunConfig, open_engine.run, "run"), artifact, open_engine
    )
    core = EngineCore.open(artifact, config)
    core.scheduler.set_interactive(config.max_mixed_tokens, on_gpu=core.device != "cpu")
    if open_engine.warm_up:
        on_progress("warming up", 0, 1)
        core.warm_up(all_specializations=True)
    return core


def sends_op_heartbeats(open_engine: OpenEngine, device: str) -> bool:
    """Whether each op of a step sends a heartbeat.

    Steps on a GPU are short and only launch kernels. Without warm-up, however, the first steps
    compile kernels, one op after another.
    """
    return open_engine.watchdog_seconds > 0 and (device == "cpu" or not open_engine.warm_up)


def run_segment_worker(
    open_engine: OpenEngine, artifact: Artifact, channel: MessageChannel, inbox: Inbox
) -> None:
    """Run a segmentation engine until the server is gone.

    Raises:
        ModelmillError: the engine cannot be loaded.
    """
    from modelmill.serve import segment_worker

    model = segment_worker.load_sam(open_engine, artifact)
    if open_engine.watchdog_seconds and model.device.type == "cpu":
        model.on_heartbeat(
            HeartbeatSender(channel.send, poll_interval(open_engine.watchdog_seconds))
        )
    inbox.finish_opening()
    channel.send(segment_worker.ready_message(model, str(artifact.path)))
    segment_worker.SegmentWorker(model, channel, inbox, open_engine.max_pixels).run()


class _AnswerGuideFactory:
    """Makes guides.

    The vocabulary is read for the first guide only: most servers never need it.
    """

    def __init__(self, path: Path, chat_template: str | None, vocab_size: int) -> None:
        self._path = path
        self._chat_template = chat_template
        self._vocab_size = vocab_size
        self._text_processor: TextProcessor | None = None

    def __call__(self, request: Request) -> Guide:
        if self._text_processor is None:
            self._text_processor = TextProcessor.from_engine(self._path, self._chat_template)
        return self._text_processor.make_guide(request, self._vocab_size)


def _with_memory_budget(
    config: RunConfig, artifact: Artifact, open_engine: OpenEngine
) -> RunConfig:
    """``config`` with this engine's share of the memory, for KV pages and recurrent states.

    Raises:
        CapacityError: not even one sequence's recurrent state fits.
    """
    plain = Artifact(artifact.path, artifact.manifest)
    sizes = (config.kv_cache_bytes, config.state_cache_bytes)
    if open_engine.cache_bytes is not None and None in sizes:
        return split_cache_bytes(config, plain, open_engine.cache_bytes // config.tp)
    device = pick_device(config.device)
    if device == "cpu":
        num_other_engines = open_engine.num_loaded_before + len(open_engine.later_weight_bytes)
        shared = budget.with_cpu_budget(
            config,
            cpu_kv_cache_budget(config.tp, open_engine.segment_bytes),
            num_other_engines,
            open_engine.segment_bytes,
        )
        if shared is config or shared.kv_cache_bytes is None:
            return config
        return split_cache_bytes(shared, plain, shared.kv_cache_bytes)
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return budget.with_gpu_memory_share(
        config,
        free,
        total,
        artifact.nbytes(),
        open_engine.later_weight_bytes,
        open_engine.segment_bytes,
    )


class _ProgressArtifact(Artifact):
    """An artifact that reports how many of its bytes have been read."""

    def __init__(self, artifact: Artifact, on_progress: Progress) -> None:
        super().__init__(artifact.path, artifact.manifest)
        self._on_progress = on_progress
        self._done_bytes = 0
        self._total_bytes = artifact.nbytes()

    def tensor(self, name: str) -> Any:
        tensor = super().tensor(name)
        self._done_bytes += tensor.numel() * tensor.element_size()
        self._on_progress("loading", min(self._done_bytes, self._total_bytes), self._total_bytes)
        return tensor


def _loading_reporter(channel: MessageChannel, seconds: float = 0.1) -> Progress:
    """Make a callback that sends LoadingUpdate, at most every ``seconds`` for each stage."""
    last: dict[str, float] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(stage, 0.0) >= seconds or done >= total:
            last[stage] = now
            channel.send(LoadingUpdate(stage, done, total))

    return on_progress


def _announce(on_progress: Progress, stage: str, done: int, total: int) -> None:
    """Report progress to the server and to the terminal.

    Used for a stage that takes long and comes before everything else.
    """
    sys.stderr.write(f"modelmill: {stage}\n")
    on_progress(stage, done, total)


def main(argv: list[str]) -> int:
    """``python -m modelmill.serve.worker FD``."""
    # signals go to the server, which stops this process by closing the socket
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    malloc.set_malloc_thresholds()
    channel = MessageChannel(socket.socket(fileno=int(argv[0])))
    open_engine = channel.receive()
    if not isinstance(open_engine, OpenEngine):
        return EXIT_SERVER_GONE
    inbox = Inbox(channel, on_server_gone=lambda: os._exit(EXIT_SERVER_GONE), is_opening=True)
    try:
        on_progress = _loading_reporter(channel)
        compile_cpu_kernels(
            str(open_engine.run.get("device", "auto")), partial(_announce, on_progress)
        )
        artifact = open_or_build_artifact(open_engine, on_progress)
        if artifact.manifest.engine_type == SEGMENTATION:
            run_segment_worker(open_engine, artifact, channel, inbox)
            return EXIT_SERVER_GONE
        core, path = load_engine_core(open_engine, artifact, on_progress), str(artifact.path)
    except ModelmillError as error:
        channel.send(OpenFailed(str(error), isinstance(error, UsageError)))
        return 1
    except BrokenPipeError:
        return EXIT_SERVER_GONE
    inbox.accept_grammars(_AnswerGuideFactory(Path(path), open_engine.chat_template, core.vocab))
    if sends_op_heartbeats(open_engine, core.device):
        core.on_heartbeat(
            HeartbeatSender(channel.send, poll_interval(open_engine.watchdog_seconds))
        )
    inbox.finish_opening()
    channel.send(ready_message(core, path))
    EngineWorker(core, channel, inbox).run()
    return EXIT_SERVER_GONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The worker process of one engine: requests arrive over a socket, tokens leave over it.

Started by ``serve.worker_process``. It exits when the other end of its socket is closed, so no
worker outlives its server. An error inside a step ends the process; the server starts another.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from dataclasses import asdict
from functools import partial
from pathlib import Path

from modelmill.artifact.store import Artifact
from modelmill.core import malloc
from modelmill.core.errors import ModelmillError, RequestError, UsageError
from modelmill.core.types import Guide, Request
from modelmill.loader.device import ensure_cpu_kernels_compiled
from modelmill.runtime.engine_core import OUT_OF_MEMORY_ERRORS, EngineCore
from modelmill.runtime.sequence import Sequence
from modelmill.serve import worker_messages as wire
from modelmill.serve.kv_session_worker import KvSessionMessageHandler, LoadedKvSession
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE
from modelmill.serve.sleep_worker import handle_sleep_message
from modelmill.serve.watchdog import poll_interval
from modelmill.serve.worker_inbox import (
    HeartbeatSender,
    MessageChannel,
    ReceivedRequest,
    WorkerInbox,
)
from modelmill.serve.worker_loading import (
    announce_progress,
    load_engine_core,
    make_loading_reporter,
    open_or_build_artifact,
)
from modelmill.text_processor import TextProcessor

EXIT_SERVER_GONE = 3
"""Exit code of a worker whose server is gone."""
OUT_OF_MEMORY_MESSAGE = (
    "the engine has no memory left for this request; send fewer or smaller "
    "inputs, or try again soon"
)


class EngineWorker:
    """Steps an engine core until its server is gone."""

    def __init__(
        self, engine_core: EngineCore, channel: MessageChannel, inbox: WorkerInbox
    ) -> None:
        self.engine_core = engine_core
        self._channel = channel
        self._inbox = inbox
        self._unstarted: deque[tuple[float, Sequence]] = deque()
        self._in_order = True
        self._sessions = KvSessionMessageHandler(engine_core, channel.send, inbox.messages.put)

    def run(self) -> None:
        """Process messages and run steps until the server is gone."""
        core, inbox = self.engine_core, self._inbox.messages
        try:
            while True:
                while not (core.has_work and inbox.empty()):
                    message = inbox.get()
                    if message is None:
                        return
                    self._handle_message(message)
                tokens = core.step()
                if self._unstarted:
                    self._report_started_requests()
                if tokens:
                    self._channel.send(wire.StepTokens(tokens))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _add_request(self, arrival: ReceivedRequest) -> None:
        request, guide = arrival.request, arrival.guide
        make_guide = None if guide is None else lambda _: guide.copy()
        try:
            if arrival.error:
                raise RequestError(arrival.error)
            self.engine_core.add(request, make_guide)
        except RequestError as error:
            self._channel.send(wire.RequestRejected(request.id, str(error)))
            return
        except OUT_OF_MEMORY_ERRORS:
            # out of memory while images or the prompt were prepared, outside a step: nothing of
            # the request remains
            self._channel.send(
                wire.RequestRejected(request.id, OUT_OF_MEMORY_MESSAGE, out_of_memory=True)
            )
            return
        # keep the sequence itself: a request that finishes in its first step has already left
        # ``live_sequences`` when its start is reported
        seq = self.engine_core.output_processor.live_sequences[request.id][0]
        self._in_order &= not self._unstarted or self._unstarted[-1][1].sort_key < seq.sort_key
        self._unstarted.append((arrival.arrived_at, seq))

    def _report_started_requests(self) -> None:
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
                    wire.RequestStarted(seq.request.id, round(seq.started_at - arrived_at, 6))
                )
        self._unstarted, self._in_order = waiting, not waiting

    def _handle_message(self, message: wire.Message | ReceivedRequest | LoadedKvSession) -> None:
        if isinstance(message, ReceivedRequest):
            self._add_request(message)
        elif isinstance(message, wire.AbortRequest):
            self.engine_core.abort(message.id)
        elif isinstance(message, wire.FinishSequence):
            self.engine_core.finish_on_stop_string(message.id, message.index)
        elif isinstance(message, wire.GetStats):
            self._channel.send(wire.StatsReply(message.number, asdict(self.engine_core.stats())))
        elif isinstance(message, wire.Ping):
            self.engine_core.ping_tp_workers()
            self._channel.send(wire.Heartbeat())
        elif isinstance(message, wire.SaveKvSession):
            self._sessions.save(message)
        elif isinstance(message, wire.RestoreKvSession):
            self._sessions.restore(message)
        elif isinstance(message, LoadedKvSession):
            self._sessions.finish_restore(message)
        elif isinstance(message, (wire.SleepEngine, wire.WakeEngine)):
            self._run_leftover_steps()
            with self._inbox.answering_pings():
                reply = handle_sleep_message(self.engine_core, message)
            self._channel.send(reply)

    def _run_leftover_steps(self) -> None:
        """Report what requests that have ended leave behind; the server sends no others now."""
        core = self.engine_core
        while core.has_work and not core.output_processor.live_sequences:
            if tokens := core.step():
                self._channel.send(wire.StepTokens(tokens))


def make_ready_message(engine_core: EngineCore, path: str) -> wire.EngineReady:
    """Describe an open engine core to the server."""
    limits = engine_core.request_limits
    return wire.EngineReady(
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
        experts_by_rank=list(engine_core.num_experts_by_rank),
    )


def needs_op_heartbeats(open_engine: wire.OpenEngine, device: str) -> bool:
    """Whether each op of a step sends a heartbeat.

    Steps on a GPU are short and only launch kernels. Without warm-up, however, the first steps
    compile kernels, one op after another.
    """
    return open_engine.watchdog_seconds > 0 and (device == "cpu" or not open_engine.warm_up)


def run_segmentation_worker(
    open_engine: wire.OpenEngine, artifact: Artifact, channel: MessageChannel, inbox: WorkerInbox
) -> None:
    """Run a segmentation engine until the server is gone.

    Raises:
        ModelmillError: the engine cannot be loaded.
    """
    from modelmill.serve import segmentation_worker

    model = segmentation_worker.load_sam(open_engine, artifact)
    if open_engine.watchdog_seconds and model.device.type == "cpu":
        model.set_heartbeat(
            HeartbeatSender(channel.send, poll_interval(open_engine.watchdog_seconds))
        )
    inbox.stop_answering_pings()
    channel.send(segmentation_worker.make_ready_message(model, str(artifact.path)))
    segmentation_worker.SegmentationWorker(model, channel, inbox, open_engine.max_pixels).run()


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


def main(argv: list[str]) -> int:
    """``python -m modelmill.serve.worker FD``."""
    # signals go to the server, which stops this process by closing the socket
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    malloc.set_malloc_thresholds()
    channel = MessageChannel(socket.socket(fileno=int(argv[0])))
    open_engine = channel.receive()
    if not isinstance(open_engine, wire.OpenEngine):
        return EXIT_SERVER_GONE
    inbox = WorkerInbox(channel, on_server_gone=lambda: os._exit(EXIT_SERVER_GONE), is_opening=True)
    try:
        on_progress = make_loading_reporter(channel)
        ensure_cpu_kernels_compiled(
            str(open_engine.run.get("device", "auto")), partial(announce_progress, on_progress)
        )
        artifact = open_or_build_artifact(open_engine, on_progress)
        if artifact.manifest.engine_type == SEGMENTATION_ENGINE_TYPE:
            run_segmentation_worker(open_engine, artifact, channel, inbox)
            return EXIT_SERVER_GONE
        core, path = load_engine_core(open_engine, artifact, on_progress), str(artifact.path)
    except ModelmillError as error:
        channel.send(wire.OpenFailed(str(error), isinstance(error, UsageError)))
        return 1
    except BrokenPipeError:
        return EXIT_SERVER_GONE
    inbox.set_guide_factory(_AnswerGuideFactory(Path(path), open_engine.chat_template, core.vocab))
    if needs_op_heartbeats(open_engine, core.device):
        core.set_heartbeat(
            HeartbeatSender(channel.send, poll_interval(open_engine.watchdog_seconds))
        )
    inbox.stop_answering_pings()
    channel.send(make_ready_message(core, path))
    EngineWorker(core, channel, inbox).run()
    return EXIT_SERVER_GONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The API process's side of one engine: starts, supervises and restarts its worker process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import Manifest
from modelmill.core import log
from modelmill.core.errors import (
    ModelmillError,
    RequestError,
    UsageError,
)
from modelmill.core.types import EngineStats
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.sequence import RequestLimits, check_request_and_get_ids
from modelmill.serve import memory_budget
from modelmill.serve import worker_messages as wire
from modelmill.serve.access.fair_queue import FairQueueClock
from modelmill.serve.engine_state import (
    EngineNotReady,
    EngineState,
    LoadProgress,
    QueueFull,
    ServerShuttingDown,
)
from modelmill.serve.generation_client import GenerationClient
from modelmill.serve.kv_session_client import KvSessionClient
from modelmill.serve.metrics import EngineMetrics, SegmentationMetrics
from modelmill.serve.request_handle import HttpRequestHandle, WorkerLost
from modelmill.serve.segmentation_client import PendingSegmentation, SegmentationClient
from modelmill.serve.segmentation_messages import (
    SEGMENTATION_ENGINE_TYPE,
    SegmentationFailure,
    SegmentationJob,
    SegmentationResult,
)
from modelmill.serve.sleep_client import SleepClient
from modelmill.serve.stats_client import StatsClient
from modelmill.serve.watchdog import Watchdog
from modelmill.serve.worker_process import WorkerLauncher, WorkerProcess, launch_worker
from modelmill.text_processor import TextProcessor

MIN_HEALTHY_WORKER_SECONDS = 30.0
"""A worker that lived for fewer seconds counts as a failed start."""
MAX_FAILED_STARTS = 5
KILL_TIMEOUT = 30.0
"""Seconds to wait for a killed process to exit."""
READ_CHUNK_BYTES = 16 << 10
"""Bytes per read: about five steps of 64 sequences.

An API process that falls behind merges their deltas into one event.
"""
MIN_TOKENIZE_LIMIT = 16384
"""Lower bound of the tokens that /tokenize and /detokenize handle, for any engine."""
_log = log.get_logger("serve")


class EngineClient:
    """A worker and the requests it runs; belongs to one asyncio event loop."""

    def __init__(
        self,
        name: str,
        open_engine: wire.OpenEngine,
        *,
        max_waiting: int,
        launch: WorkerLauncher = launch_worker,
        load_text_processor: Callable[
            [Path, str | Path | None], TextProcessor
        ] = TextProcessor.from_engine,
        restart_delay: float = 0.2,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        manifest: Manifest | None = None,
    ) -> None:
        """Describe the engine; ``supervise_worker`` starts it.

        Args:
            name: served name.
            open_engine: sent to every new worker.
            max_waiting: sequences that may wait beyond those of a step.
            launch: starts a worker process.
            load_text_processor: called with the engine folder and a chat template.
            restart_delay: seconds before the first restart.
            sleep: waits between two checks of the watchdog.
            manifest: of an engine that is loaded on demand: it is known before the engine is open.
        """
        self.name = name
        self._state = EngineState.LOADING if manifest is None else EngineState.UNLOADED
        self.state_changed = asyncio.Event()
        self.progress = LoadProgress()
        self.error: str | None = None
        self.is_usage_error = False
        self.restarts = 0
        self.engine_info: wire.EngineReady | None = None
        self.manifest = manifest
        self.created_at = int(time.time())
        self.load_finished = asyncio.Event()
        self._open_engine, self._max_waiting = open_engine, max_waiting
        self._launch = launch
        self._load_text_processor = load_text_processor
        self._restart_delay = restart_delay
        self._text_processor: TextProcessor | None = None
        self._worker_process: WorkerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_closing = False
        self._was_ready = False
        self._sleep = sleep
        self._hang_reason = ""  # why the current worker was killed as hung
        self.metrics: EngineMetrics | None = None
        self._preload: asyncio.Task[None] | None = None
        self.fair_queue = FairQueueClock()
        self.generation_client = GenerationClient(
            name, self._send, self._write, lambda: self.sequence_capacity, self.fair_queue
        )
        self.session_client = KvSessionClient(self._send)
        self._sleep_client = SleepClient(self._send)
        self.stats_client = StatsClient(self._send)
        self.segment_client = SegmentationClient(
            name, self._send, lambda id: self._send(wire.AbortRequest(id))
        )

    def set_metrics(self, metrics: EngineMetrics, segment_metrics: SegmentationMetrics) -> None:
        """Count requests and tokens in these metrics from now on."""
        self.metrics = metrics
        self.generation_client.set_metrics(metrics)
        self.segment_client.set_metrics(segment_metrics)

    @property
    def state(self) -> EngineState:
        """State of the engine."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self.state_changed.set()

    # -- requests

    @property
    def text_processor(self) -> TextProcessor:
        """The engine's tokenizer, chat template and detokenizer.

        Raises:
            EngineNotReady: it is not loaded yet.
            RequestError: the engine has none.
        """
        self._check_engine_type("language")
        if self._text_processor is None:
            raise EngineNotReady(f"the engine {self.name} is still loading")
        return self._text_processor

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without one."""
        return None if self._worker_process is None else self._worker_process.pid

    @property
    def request_limits(self) -> RequestLimits:
        """The limits that requests are checked against.

        Raises:
            EngineNotReady: the engine is not ready.
            RequestError: the engine does not generate text.
        """
        info = self._require_ready()
        self._check_engine_type("language")
        return RequestLimits(
            info.vocab_size,
            info.max_model_len,
            info.kv_tokens,
            info.max_num_seqs,
        )

    @property
    def engine_type(self) -> str | None:
        """Either "language" or "segmentation"; None before it is known."""
        if self.engine_info is not None:
            return self.engine_info.engine_type
        return None if self.manifest is None else self.manifest.engine_type

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the context; None: it has none, or it is not known before the engine is open.

        Before an engine is loaded this is what it will have: that of its files, or the lower one
        that the server was started with.
        """
        if self.engine_info is not None:
            return self.engine_info.max_model_len or None
        if self.manifest is None or self.engine_type == SEGMENTATION_ENGINE_TYPE:
            return None
        length = self.manifest.max_model_len
        return min(length, self._open_engine.run.get("max_model_len") or length)

    @property
    def path(self) -> Path:
        """The engine folder; of a checkpoint that is not built yet, the checkpoint."""
        return Path(self._open_engine.model if self.engine_info is None else self.engine_info.path)

    def preload_text_processor(self) -> None:
        """Read tokenizer and chat template of an engine that is not loaded; call it on a thread.

        Raises:
            ModelmillError: they cannot be read.
        """
        length = self.max_model_len
        if self._text_processor is None and length is not None:
            self._text_processor = self._read_text_processor(self.path, length)

    def start_text_processor_preload(self) -> None:
        """Read tokenizer and chat template on a thread while the worker loads the weights."""
        self._preload = asyncio.create_task(asyncio.to_thread(self.preload_text_processor))
        # a worker that fails first leaves the error unread, which asyncio would log
        self._preload.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _read_text_processor(self, path: Path, max_model_len: int) -> TextProcessor:
        processor = self._load_text_processor(path, self._open_engine.chat_template)
        longest = max_tokenize_tokens(max_model_len)
        processor.set_input_limits(self._open_engine.max_pixels, longest, max_model_len)
        processor.set_answer_history_capacity(self._open_engine.answer_history_bytes)
        processor.set_parse_special(self._open_engine.parse_special)
        return processor

    @property
    def input_modalities(self) -> list[str]:
        """Input types that a request may contain; empty before they are known."""
        if self.engine_type == SEGMENTATION_ENGINE_TYPE:
            return ["image"]
        return (
            []
            if self._text_processor is None
            else ["text", "image"]
            if self._text_processor.supports_images
            else ["text"]
        )

    @property
    def has_chat_template(self) -> bool | None:
        """Whether the engine has a chat template; None before that is known."""
        if self.engine_type == SEGMENTATION_ENGINE_TYPE:
            return False
        return (
            None if self._text_processor is None else self._text_processor.chat_format is not None
        )

    @property
    def api_and_web_sampling_defaults(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Sampling defaults of API requests, and those of the web page; None: not known yet."""
        if self._text_processor is None:
            return None
        return (
            self._text_processor.generation_defaults.to_dict(),
            self._text_processor.checkpoint_defaults.to_dict(),
        )

    @property
    def _kv_and_prefix_cache_max_bytes(self) -> tuple[int, int]:
        """Limits over all ranks in bytes: of the KV cache, and of cached prefixes in it."""
        info = self._require_ready()
        page = info.page_bytes * self._open_engine.run.get("tp", 1)
        return info.num_pages * page, info.max_prefix_pages * page

    @property
    def cache_bytes(self) -> int:
        """Bytes of KV pages and recurrent state over all ranks; 0 before the engine is open."""
        info = self.engine_info
        if info is None:
            return 0
        caches = (info.num_pages + 1) * info.page_bytes + info.state_cache_bytes
        return caches * int(self._open_engine.run.get("tp", 1))

    @property
    def memory_summary_lines(self) -> tuple[str, ...]:
        """What lies where, in short texts: the KV cache, and whole experts of ranks if they are.

        Raises:
            EngineNotReady: the engine is not ready.
        """
        info = self._require_ready()
        if info.engine_type == SEGMENTATION_ENGINE_TYPE:
            return ()
        cache = memory_budget.kv_cache_summary(
            info.device, info.kv_tokens, *self._kv_and_prefix_cache_max_bytes
        )
        if not info.experts_by_rank:
            return (cache,)
        return cache, f"experts by rank: {', '.join(map(str, info.experts_by_rank))}"

    def check_accepts_segmentation(self) -> None:
        """Check that the engine can take a segmentation request now.

        Raises:
            EngineNotReady: the engine is not ready.
            RequestError: the engine does not segment.
        """
        self._require_ready()
        self._check_engine_type(SEGMENTATION_ENGINE_TYPE)

    def _require_ready(self) -> wire.EngineReady:
        if self.state is not EngineState.READY or self.engine_info is None:
            raise EngineNotReady(f"the engine {self.name} is {self.state.value}; try again soon")
        return self.engine_info

    def _check_engine_type(self, expected: str) -> None:
        if self.engine_type not in (None, expected):
            capability = (
                "segments images: send requests to /v1/segment"
                if self.engine_type == SEGMENTATION_ENGINE_TYPE
                else "generates text; it does not segment images"
            )
            raise RequestError(f"model {self.name} {capability}")

    def submit_segmentation(self, job: SegmentationJob) -> PendingSegmentation:
        """Queue a segmentation job.

        Raises:
            RequestError: the engine does not segment.
            EngineNotReady: the engine is not ready.
            QueueFull: too many jobs wait.
        """
        self.check_accepts_segmentation()
        if self.segment_client.is_full(job, self._max_waiting + 1):
            raise QueueFull(
                f"the engine {self.name} has {len(self.segment_client)} images in its queue; try "
                "again soon"
            )
        return self.segment_client.submit(job)

    @property
    def sequence_capacity(self) -> int:
        """Sequences that may run and wait together."""
        running = 0 if self.engine_info is None else self.engine_info.max_num_seqs
        return self._max_waiting + running

    def check_capacity(self, num_sequences: int) -> None:
        """Check whether so many sequences could be queued now, before the prompts are processed.

        Raises:
            RequestError: the server never queues so many.
            QueueFull: the queue has no room now.
        """
        self.generation_client.check_capacity(num_sequences)

    def encode_requests(self, request_states: Sequence[RequestOutputState]) -> list[bytes]:
        """Encode requests as frames for the worker.

        Long prompts take milliseconds: call it on a thread, not on the event loop.

        Raises:
            RequestError: a request can never be served.
            EngineNotReady: the engine is not ready.
        """
        limits = self.request_limits
        for state in request_states:
            check_request_and_get_ids(state.request, limits)
        return [wire.encode_frame(wire.AddRequest(state.request)) for state in request_states]

    def submit(
        self, request_states: Sequence[RequestOutputState], frames: Sequence[bytes] | None = None
    ) -> HttpRequestHandle:
        """Queue requests, all or none.

        Args:
            request_states: one per prompt.
            frames: the result of ``encode_requests``, if already computed.

        Raises:
            RequestError: a request can never be served.
            EngineNotReady: the engine is not ready.
            QueueFull: too many sequences wait.
        """
        self._require_ready()
        frames = self.encode_requests(request_states) if frames is None else frames
        return self.generation_client.submit(request_states, frames)

    async def stats(self, timeout: float = 1.0) -> EngineStats | None:
        """Return counters since the server started and current gauges; None before any report.

        A worker that does not reply within ``timeout`` seconds yields its last report.
        """
        if self._writer is not None and self.state is EngineState.READY:
            await self.stats_client.refresh_stats(timeout)
        return self.stats_client.total_stats

    def abort_all(self, reason: str) -> None:
        """End every request with ServerShuttingDown."""
        self.generation_client.fail_all(ServerShuttingDown(reason))
        self.segment_client.fail_all(ServerShuttingDown(reason))

    # -- sleep

    async def sleep(self) -> wire.SleepOrWakeReply:
        """Let an engine without requests give its memory back.

        Raises:
            CapacityError: it cannot; it goes on.
            ModelmillError: it is not ready, or its worker is lost.
        """
        self._require_ready()
        reply = await self._sleep_client.sleep()
        self.state = EngineState.SLEEPING
        return reply

    async def wake_up(self) -> wire.SleepOrWakeReply:
        """Let a sleeping engine take its memory again.

        Raises:
            CapacityError: it cannot; it still sleeps.
            ModelmillError: its worker is lost.
        """
        if self.state is not EngineState.SLEEPING:
            raise EngineNotReady(f"the engine {self.name} is {self.state.value}, not sleeping")
        reply = await self._sleep_client.wake_up()
        self.state = EngineState.READY
        return reply

    # -- worker lifetime

    async def supervise_worker(self) -> None:
        """Keep a worker running until ``close``.

        Also returns if no worker can be started: ``state`` is FAILED and ``error`` says why.
        """
        num_failed_starts = 0
        try:
            while not self._is_closing:
                started_at = time.monotonic()
                code = None
                self._hang_reason = ""
                try:
                    code = await self._run_worker()
                    end_reason = self._hang_reason or f"ended with status {code}"
                except Exception as error:
                    # the system has no resources for a process, or a bug: only this worker is lost
                    end_reason = f"failed: {_safe_error_text(error)}"
                    _log.exception(
                        "worker failed",
                        extra={"data": {"engine": self.name, "reason": _safe_error_text(error)}},
                    )
                if self._is_closing:
                    break
                num_failed_starts = (
                    num_failed_starts + 1
                    if time.monotonic() - started_at < MIN_HEALTHY_WORKER_SECONDS
                    else 0
                )
                if not self._was_ready or num_failed_starts >= MAX_FAILED_STARTS:
                    self.error = self.error or f"the worker of {self.name} {end_reason}"
                    self.state = EngineState.FAILED
                    return
                self.restarts += 1
                if self.metrics is not None:
                    self.metrics.record_restart("hung" if self._hang_reason else "ended")
                _log.error(
                    "worker ended",
                    extra={"data": {"engine": self.name, "status": code, "restarting": True}},
                )
                await asyncio.sleep(self._restart_delay * 2 ** min(num_failed_starts, 6))
            if self.state is not EngineState.FAILED:
                self.state = EngineState.STOPPED
        finally:
            self.load_finished.set()

    def prepare_rerun(self) -> None:
        """Forget how the last ``supervise_worker`` ended, so that it can be called again.

        What is known about the engine stays; counters continue.
        """
        self._is_closing = self._was_ready = self.is_usage_error = False
        self.error = None
        self.load_finished.clear()
        self.state = EngineState.LOADING

    def mark_unloaded(self) -> None:
        """Show that no worker runs after ``supervise_worker`` has returned; one may be loaded."""
        self.state = EngineState.UNLOADED

    def replace_manifest(self, manifest: Manifest) -> None:
        """Forget what is known about the engine, whose files have changed."""
        self.manifest = manifest
        self.engine_info = self._text_processor = None

    async def close(self) -> None:
        """Kill the worker; its requests end with an error."""
        self._is_closing = True
        if self._worker_process is not None:
            self._worker_process.kill()

    async def _run_worker(self) -> int:
        """Run one worker from start to end; return its exit code.

        Raises:
            OSError: no process can be started.
        """
        sock, self._worker_process = await self._launch()
        if self._is_closing:
            # ``close`` was called while the process was being started
            self._worker_process.kill()
        watchdog = Watchdog(
            self._open_engine.watchdog_seconds, lambda: self._send(wire.Ping()), self._sleep
        )
        hang_task = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._send(self._make_open_message())
            hang_task = asyncio.create_task(
                self._watch_for_hang(watchdog, self._writer, self._worker_process)
            )
            async for messages in read_message_batches(reader):
                watchdog.on_message()
                for message in messages:
                    if isinstance(message, wire.EngineReady):
                        with watchdog.ignoring_silence():
                            await self._on_ready(message)
                    else:
                        self._handle_message(message)
                # let the tasks that wait for these messages run before the next read
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            if hang_task is not None:
                hang_task.cancel()
            process, self._worker_process = self._worker_process, None
            process.kill()
            if self._writer is None:
                sock.close()
            self._on_worker_lost()
            code = await self._wait_for_killed_worker(process)
        return code

    async def _wait_for_killed_worker(self, process: WorkerProcess) -> int:
        """Return the exit code of a killed worker.

        Raises:
            ConnectionAbortedError: it does not exit; ``error`` is set.
        """
        try:
            return await asyncio.wait_for(process.wait(), KILL_TIMEOUT)
        except TimeoutError:
            # a driver or disk that does not respond: neither a restart nor a shutdown may wait
            reason = (
                f"{self._hang_reason or 'ended'}, and the system cannot end its process "
                f"{process.pid}"
            )
            self.error = f"the worker of {self.name} {reason}"
            self.state, self._is_closing = EngineState.FAILED, True
            raise ConnectionAbortedError from None

    async def _watch_for_hang(
        self, watchdog: Watchdog, writer: asyncio.StreamWriter, process: WorkerProcess
    ) -> None:
        """Kill a worker that hangs; ``supervise_worker`` then continues as if it had died."""
        seconds = await watchdog.wait_until_hung()
        self._hang_reason = f"gave no sign of life for {seconds:g} s"
        data = {
            "engine": self.name,
            "seconds": seconds,
            "pid": process.pid,
            "answers": self.generation_client.num_sequences,
        }
        _log.error("worker hung", extra={"data": data})
        process.kill()
        # close the socket now: clients get the error without waiting for the process to exit
        writer.transport.abort()

    def _make_open_message(self) -> wire.OpenEngine:
        """The OpenEngine message; a restarted worker takes the same memory as the previous one."""
        if self.engine_info is None or self.engine_info.engine_type == SEGMENTATION_ENGINE_TYPE:
            return self._open_engine
        run = {
            **self._open_engine.run,
            "kv_cache_bytes": max(
                (self.engine_info.num_pages + 1) * self.engine_info.page_bytes, 1
            ),
        }
        if self.engine_info.state_cache_bytes:
            run["state_cache_bytes"] = self.engine_info.state_cache_bytes
        if self.engine_info.max_prefix_pages and self.engine_info.page_bytes:
            run["prefix_cache_bytes"] = (
                self.engine_info.max_prefix_pages * self.engine_info.page_bytes
            )
        return replace(self._open_engine, run=run)

    async def _on_ready(self, engine_info: wire.EngineReady) -> None:
        if self._preload is not None:
            with contextlib.suppress(ModelmillError):  # it is raised again below
                await self._preload
            self._preload = None
        if self._text_processor is None and engine_info.engine_type != SEGMENTATION_ENGINE_TYPE:
            try:
                text_processor = await asyncio.to_thread(
                    self._read_text_processor, Path(engine_info.path), engine_info.max_model_len
                )
                self._text_processor = text_processor
            except ModelmillError as error:
                self.error = str(error)
                self.is_usage_error = isinstance(error, UsageError)
                self._is_closing = True
                self.state = EngineState.FAILED
                raise ConnectionAbortedError from None
            if (warning := text_processor.generation_defaults.unused_warning()) is not None:
                _log.warning(
                    "generation_config", extra={"data": {"engine": self.name, "reason": warning}}
                )
        self.engine_info, self._was_ready = engine_info, True
        self.error = None
        self.state = EngineState.READY
        self.load_finished.set()
        flag = self._open_engine.run.get("max_model_len") or 0
        if flag > engine_info.max_model_len > 0:
            reason = f"--max-model-len {flag} exceeds the engine's {engine_info.max_model_len}"
            _log.warning(
                "max_model_len",
                extra={"data": {"engine": self.name, "reason": f"{reason}, which holds"}},
            )
        data = {"engine": self.name, "device": engine_info.device, "pages": engine_info.num_pages}
        if engine_info.engine_type != SEGMENTATION_ENGINE_TYPE:
            data["kv_cache_bytes"], data["prefix_cache_bytes"] = self._kv_and_prefix_cache_max_bytes
        if engine_info.experts_by_rank:
            data["experts_by_rank"] = engine_info.experts_by_rank
        _log.info("ready", extra={"data": data})

    def worker_lost_error(self) -> WorkerLost:
        """The error that waiting requests get when the worker is gone."""
        return WorkerLost(
            f"the engine {self.name} {self._hang_reason or 'ended'} while it answered; it is "
            "being restarted"
        )

    def _on_worker_lost(self) -> None:
        """Fail all requests of a worker that is gone."""
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        elif self.state is EngineState.SLEEPING:
            # another one would take the memory that was given back; this one wakes up no more
            self.state, self._is_closing = EngineState.STOPPED, True
        self.progress = LoadProgress()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        error = self.worker_lost_error()
        self.generation_client.fail_all(error)
        self.generation_client.clear()
        self.segment_client.fail_all(error)
        self.session_client.fail_all(error)
        self._sleep_client.fail_all(error)
        self.stats_client.on_worker_lost()

    # -- messages

    def _send(self, message: wire.Message) -> None:
        self._write(wire.encode_frame(message))

    def _write(self, frame: bytes) -> None:
        if self._writer is not None:
            self._writer.write(frame)

    def _handle_message(self, message: wire.Message) -> None:
        if isinstance(message, (wire.StepTokens, wire.RequestStarted, wire.RequestRejected)):
            self.generation_client.handle_message(message)
        elif isinstance(message, wire.StatsReply):
            self.stats_client.handle_message(message)
        elif isinstance(message, wire.LoadingUpdate):
            self.progress = LoadProgress(message.stage, message.done, message.total)
        elif isinstance(message, (SegmentationResult, SegmentationFailure)):
            self.segment_client.handle_message(message)
        elif isinstance(message, wire.KvSessionReply):
            self.session_client.handle_message(message)
        elif isinstance(message, wire.SleepOrWakeReply):
            self._sleep_client.handle_message(message)
        elif isinstance(message, wire.OpenFailed):
            self.error, self.is_usage_error = message.message, message.is_usage_error


def max_tokenize_tokens(max_model_len: int) -> int:
    """Token limit of a text to tokenize.

    Twice ``max_model_len``, so that clients can count the tokens of a prompt that is too long.
    """
    return max(2 * max_model_len, MIN_TOKENIZE_LIMIT)


async def read_message_batches(reader: asyncio.StreamReader) -> AsyncIterator[list[wire.Message]]:
    """Yield messages as they arrive, all complete ones of a read together; end with the connection.

    Raises:
        ConnectionError: the connection failed.
    """
    buffer = bytearray()
    while chunk := await reader.read(READ_CHUNK_BYTES):
        buffer += chunk
        messages = wire.decode_frames(buffer)
        if messages:
            yield messages


def _safe_error_text(error: Exception) -> str:
    """Text of an error without user data.

    The system's message of an OSError, else the name of the error's class.
    """
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__

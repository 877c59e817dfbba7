"""One served engine, seen from the API: its worker is started, supervised and talked to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelmill.core import log
from modelmill.core.errors import (
    GRAMMAR_LOST,
    CapacityError,
    ModelmillError,
    RequestError,
    UsageError,
)
from modelmill.core.types import FinishReason, TokenOutput
from modelmill.request_state import RequestState
from modelmill.runtime.request_limits import RequestLimits, check_request
from modelmill.runtime.stats import Stats
from modelmill.serve import budget
from modelmill.serve.metrics import EngineMetrics
from modelmill.serve.request_handle import RequestHandle, WorkerLost
from modelmill.serve.segment_client import PendingSegment, SegmentClient
from modelmill.serve.segment_messages import SEGMENTATION, SegmentFailure, SegmentJob, SegmentResult
from modelmill.serve.watchdog import Watchdog
from modelmill.serve.worker_messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    FinishSequence,
    GetStats,
    LoadingUpdate,
    Message,
    OpenEngine,
    OpenFailed,
    Ping,
    RequestRejected,
    RequestStarted,
    StatsReply,
    StepTokens,
    decode_frames,
    encode,
)
from modelmill.serve.worker_process import WorkerLauncher, WorkerProcess, launch_worker
from modelmill.text_processor import TextProcessor

MIN_WORKER_SECONDS = 30.0
"""A worker that lived for fewer seconds counts as a failed start."""
MAX_FAILED_STARTS = 5
KILL_TIMEOUT = 30.0
"""Seconds in which the system has to end a process that was killed."""
READ_CHUNK_BYTES = 16 << 10
"""Bytes that are read together: five steps of 64 answers.

An API that is behind writes them as one piece.
"""
MIN_TOKENIZE_LIMIT = 16384
"""Tokens of a text that is split or told, of any engine."""
_log = log.get_logger("serve")


class EngineState(StrEnum):
    """Where an engine stands."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineNotReady(ModelmillError):
    """The engine is loading or restarting."""


class ServerShuttingDown(EngineNotReady):
    """The server is being shut down."""


class QueueFull(CapacityError):
    """As many requests wait as may."""


@dataclass(frozen=True)
class LoadProgress:
    """How far loading has come; done and total in the stage's own unit."""

    stage: str = "starting"
    done: int = 0
    total: int = 0


class EngineClient:
    """A worker and the requests it answers. Belongs to one asyncio event loop."""

    def __init__(
        self,
        name: str,
        open_engine: OpenEngine,
        *,
        max_waiting: int,
        launch: WorkerLauncher = launch_worker,
        load_text_processor: Callable[
            [Path, str | Path | None], TextProcessor
        ] = TextProcessor.from_engine,
        restart_delay: float = 0.2,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """max_waiting: sequences beyond those of a step. restart_delay: seconds before the first
        restart.

        sleep: between two looks at whether the worker lives.
        """
        self.name, self.state, self.progress = name, EngineState.LOADING, LoadProgress()
        self.error: str | None = None
        self.is_usage_error = False
        self.restarts = 0
        self.engine_info: EngineReady | None = None
        self.created_at = int(time.time())
        self.load_finished = asyncio.Event()
        self._open_engine, self._max_waiting = open_engine, max_waiting
        self._launch, self._load_text_processor, self._restart_delay = (
            launch,
            load_text_processor,
            restart_delay,
        )
        self._text_processor: TextProcessor | None = None
        self._worker_process: WorkerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._active_requests: dict[str, tuple[RequestState, RequestHandle]] = {}
        self._num_sequences = 0
        self._stats_futures: dict[int, asyncio.Future[Stats]] = {}
        self._stats_ids = itertools.count()
        self._latest_stats: Stats | None = None
        self._previous_stats = _zero_stats(0)
        self._is_closing = False
        self._sleep = sleep
        self._hang_reason = ""  # how the worker that is ended hung
        self.metrics: EngineMetrics | None = None
        self.segment_client = SegmentClient(
            name, self._send, lambda id: self._send(AbortRequest(id))
        )

    # -- asking

    @property
    def text_processor(self) -> TextProcessor:
        """The engine's text side.

        Raises EngineNotReady before it is known, RequestError where the engine has none.
        """
        self._check_engine_type("language")
        if self._text_processor is None:
            raise EngineNotReady(f"the engine {self.name} is still loading")
        return self._text_processor

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return None if self._worker_process is None else self._worker_process.pid

    @property
    def request_limits(self) -> RequestLimits:
        """What requests are checked against.

        Raises EngineNotReady, RequestError for an engine that writes no text.
        """
        facts = self._require_ready()
        self._check_engine_type("language")
        return RequestLimits(
            facts.vocab_size,
            facts.max_model_len,
            facts.num_pages * facts.page_size,
            facts.max_num_seqs,
        )

    @property
    def engine_type(self) -> str | None:
        """What the engine does; None before that is known."""
        return None if self.engine_info is None else self.engine_info.engine_type

    @property
    def input_modalities(self) -> list[str]:
        """What a request may hold; nothing before that is known."""
        if self.engine_type == SEGMENTATION:
            return ["image"]
        return (
            []
            if self._text_processor is None
            else ["text", "image"]
            if self._text_processor.reads_images
            else ["text"]
        )

    @property
    def has_chat_template(self) -> bool | None:
        """Whether it has a chat template; None before that is known."""
        if self.engine_type == SEGMENTATION:
            return False
        return (
            None if self._text_processor is None else self._text_processor.chat_format is not None
        )

    @property
    def sampling_defaults(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """How answers are drawn where a request does not say, and where the page's user does not;
        None: not known.
        """
        if self._text_processor is None:
            return None
        return (
            self._text_processor.generation_defaults.to_dict(),
            self._text_processor.suggested_defaults.to_dict(),
        )

    @property
    def _kv_cache_bytes(self) -> tuple[int, int]:
        """What the KV cache may take on all ranks together, and kept prefixes of it."""
        facts = self._require_ready()
        page = facts.page_bytes * self._open_engine.run.get("tp", 1)
        return facts.num_pages * page, facts.max_prefix_pages * page

    @property
    def kv_cache_summary(self) -> str:
        """One line about its KV cache; empty for an engine without one. Raises EngineNotReady."""
        facts = self._require_ready()
        return (
            ""
            if facts.engine_type == SEGMENTATION
            else budget.kv_cache_summary(
                facts.device, facts.num_pages * facts.page_size, *self._kv_cache_bytes
            )
        )

    def check_segments(self) -> None:
        """Raises EngineNotReady, RequestError for an engine that does not segment."""
        self._require_ready()
        self._check_engine_type(SEGMENTATION)

    def _require_ready(self) -> EngineReady:
        if self.state is not EngineState.READY or self.engine_info is None:
            raise EngineNotReady(f"the engine {self.name} is {self.state.value}; try again soon")
        return self.engine_info

    def _check_engine_type(self, expected: str) -> None:
        if self.engine_type not in (None, expected):
            does = (
                "segments images: ask it at /v1/segment"
                if self.engine_type == SEGMENTATION
                else "writes text, it does not segment"
            )
            raise RequestError(f"model {self.name} {does}")

    def segment(self, job: SegmentJob) -> PendingSegment:
        """Ask a segmentation engine.

        Raises RequestError, EngineNotReady, QueueFull where too much waits.
        """
        self.check_segments()
        if self.segment_client.is_full(job, self._max_waiting + 1):
            raise QueueFull(
                f"the engine {self.name} has {len(self.segment_client)} pictures to look at; try "
                "again soon"
            )
        return self.segment_client.submit(job)

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait."""
        return self._max_waiting + (
            self.engine_info.max_num_seqs if self.engine_info is not None else 0
        )

    def check_capacity(self, num_sequences: int) -> None:
        """Whether so many could be queued now, before anything is made of them.

        Raises RequestError, QueueFull.
        """
        if num_sequences > self.capacity:
            raise RequestError(
                f"{num_sequences} answers at once are more than the {self.capacity} this server "
                "queues"
            )
        if self._num_sequences + num_sequences > self.capacity:
            raise QueueFull(
                f"the engine {self.name} has {self._num_sequences} answers to give; try again soon"
            )

    def encode_requests(self, request_states: Sequence[RequestState]) -> list[bytes]:
        """What the worker is sent for each request; long prompts take milliseconds: not for the
        event loop.

        Raises RequestError for what can never be served, EngineNotReady without a worker.
        """
        bounds = self.request_limits
        for dialogue in request_states:
            check_request(dialogue.request, bounds)
        return [encode(AddRequest(dialogue.request)) for dialogue in request_states]

    def submit(
        self, request_states: Sequence[RequestState], frames: Sequence[bytes] | None = None
    ) -> RequestHandle:
        """Queue requests, all or none. frames: ``encode_requests`` of them, where they are made
        already.

        Raises as ``encode_requests``, and QueueFull where too many wait.
        """
        self._require_ready()
        frames = self.encode_requests(request_states) if frames is None else frames
        ticket = RequestHandle(request_states, self._abort_requests)
        self.check_capacity(ticket.num_sequences)
        for dialogue, frame in zip(request_states, frames, strict=True):
            self._active_requests[dialogue.request.id] = dialogue, ticket
            self._num_sequences += dialogue.request.params.n
            self._write(frame)
        return ticket

    async def stats(self, timeout: float = 1.0) -> Stats | None:
        """Counters since the server was started and gauges of now; of the last time where the
        worker is slow to tell.

        None before the first.
        """
        if self._writer is not None and self.state is EngineState.READY:
            number = next(self._stats_ids)
            future = self._stats_futures[number] = asyncio.get_running_loop().create_future()
            self._send(GetStats(number))
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(future, timeout)
            finally:
                self._stats_futures.pop(number, None)
        return (
            None
            if self._latest_stats is None
            else _add_counters(self._latest_stats, self._previous_stats)
        )

    def abort_all(self, reason: str) -> None:
        """End every request with an error."""
        for _, ticket in list(self._active_requests.values()):
            ticket.fail(ServerShuttingDown(reason))
        self.segment_client.fail_all(ServerShuttingDown(reason))

    # -- the worker's life

    async def run(self) -> None:
        """Keep a worker alive until ``close``.

        Returns as well where none can be started: state FAILED, ``error``.
        """
        short = 0
        try:
            while not self._is_closing:
                began, code, self._hang_reason = time.monotonic(), None, ""
                try:
                    code = await self._run_worker()
                    end = self._hang_reason or f"ended with status {code}"
                except Exception as error:
                    # a system that has nothing left to start one with, or a bug of ours: this
                    # worker is lost, no more
                    end = f"failed: {_safe_error_text(error)}"
                    _log.exception(
                        "worker failed",
                        extra={"data": {"engine": self.name, "reason": _safe_error_text(error)}},
                    )
                if self._is_closing:
                    break
                short = short + 1 if time.monotonic() - began < MIN_WORKER_SECONDS else 0
                if self.engine_info is None or short >= MAX_FAILED_STARTS:
                    self.error = self.error or f"the worker of {self.name} {end}"
                    self.state = EngineState.FAILED
                    return
                self.restarts += 1
                if self.metrics is not None:
                    self.metrics.record_restart("hung" if self._hang_reason else "ended")
                _log.error(
                    "worker ended",
                    extra={"data": {"engine": self.name, "status": code, "restarting": True}},
                )
                await asyncio.sleep(self._restart_delay * 2 ** min(short, 6))
            if self.state is not EngineState.FAILED:
                self.state = EngineState.STOPPED
        finally:
            self.load_finished.set()

    async def close(self) -> None:
        """End the worker; what it answers ends with an error."""
        self._is_closing = True
        if self._worker_process is not None:
            self._worker_process.kill()

    async def _run_worker(self) -> int:
        """One worker from start to end; returns its exit code.

        Raises OSError where none can be started.
        """
        sock, self._worker_process = await self._launch()
        if self._is_closing:
            # nobody could end it while it was being started
            self._worker_process.kill()
        dog, watch = (
            Watchdog(self._open_engine.watchdog_seconds, lambda: self._send(Ping()), self._sleep),
            None,
        )
        try:
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._send(self._reopen_message())
            watch = asyncio.create_task(
                self._watch_for_hang(dog, self._writer, self._worker_process)
            )
            async for messages in read_messages(reader):
                dog.on_message()
                for message in messages:
                    if isinstance(message, EngineReady):
                        with dog.paused():
                            await self._on_ready(message)
                    else:
                        self._handle(message)
                # who waits for these has his turn before the next
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            if watch is not None:
                watch.cancel()
            child, self._worker_process = self._worker_process, None
            child.kill()
            if self._writer is None:
                sock.close()
            self._on_worker_lost()
            code = await self._wait_for_exit(child)
        return code

    async def _wait_for_exit(self, process: WorkerProcess) -> int:
        """The exit code of a worker that was killed.

        Raises ConnectionAbortedError where none comes, and says why.
        """
        try:
            return await asyncio.wait_for(process.wait(), KILL_TIMEOUT)
        except TimeoutError:
            # a driver or a disk that does not answer: neither a restart nor the server's end may
            # wait for it
            why = (
                f"{self._hang_reason or 'ended'}, and the system cannot end its process "
                f"{process.pid}"
            )
            self.error = f"the worker of {self.name} {why}"
            self.state, self._is_closing = EngineState.FAILED, True
            raise ConnectionAbortedError from None

    async def _watch_for_hang(
        self, watchdog: Watchdog, writer: asyncio.StreamWriter, process: WorkerProcess
    ) -> None:
        """End a worker that hangs; ``run`` then goes on as if it had died."""
        seconds = await watchdog.wait_until_hung()
        self._hang_reason = f"gave no sign of life for {seconds:g} s"
        data = {
            "engine": self.name,
            "seconds": seconds,
            "pid": process.pid,
            "answers": self._num_sequences,
        }
        _log.error("worker hung", extra={"data": data})
        process.kill()
        # one that the system cannot end at once is not waited for: who asked is told now
        writer.transport.abort()

    def _reopen_message(self) -> OpenEngine:
        """The order for a worker; one that follows another takes the same memory again."""
        if self.engine_info is None or self.engine_info.engine_type == SEGMENTATION:
            return self._open_engine
        run = {
            **self._open_engine.run,
            "kv_cache_bytes": (self.engine_info.num_pages + 1) * self.engine_info.page_bytes,
        }
        if self.engine_info.max_prefix_pages:
            run["prefix_cache_bytes"] = (
                self.engine_info.max_prefix_pages * self.engine_info.page_bytes
            )
        return replace(self._open_engine, run=run)

    async def _on_ready(self, engine_info: EngineReady) -> None:
        if self._text_processor is None and engine_info.engine_type != SEGMENTATION:
            try:
                language = await asyncio.to_thread(
                    self._load_text_processor,
                    Path(engine_info.path),
                    self._open_engine.chat_template,
                )
                language.max_image_pixels = self._open_engine.max_pixels
                if language.tokenizer is not None:
                    language.tokenizer.max_tokens = max_tokenize_tokens(engine_info.max_model_len)
                self._text_processor = language
            except ModelmillError as error:
                self.error, self.is_usage_error, self._is_closing = (
                    str(error),
                    isinstance(error, UsageError),
                    True,
                )
                self.state = EngineState.FAILED
                raise ConnectionAbortedError from None
            if (unused := language.generation_defaults.warning()) is not None:
                _log.warning(
                    "generation_config", extra={"data": {"engine": self.name, "reason": unused}}
                )
        self.engine_info, self.state, self.error = engine_info, EngineState.READY, None
        self.load_finished.set()
        data = {"engine": self.name, "device": engine_info.device, "pages": engine_info.num_pages}
        if engine_info.engine_type != SEGMENTATION:
            data["kv_cache_bytes"], data["prefix_cache_bytes"] = self._kv_cache_bytes
        _log.info("ready", extra={"data": data})

    def worker_lost_error(self) -> WorkerLost:
        """What who waits is told when the worker is gone."""
        return WorkerLost(
            f"the engine {self.name} {self._hang_reason or 'ended'} while it answered; it is "
            "being restarted"
        )

    def _on_worker_lost(self) -> None:
        """The worker is gone: everyone who waits is told."""
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        self.progress = LoadProgress()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        lost = self.worker_lost_error()
        for _, ticket in list(self._active_requests.values()):
            ticket.fail(lost)
        self.segment_client.fail_all(lost)
        self._active_requests.clear()
        self._num_sequences = 0
        for future in self._stats_futures.values():
            if not future.done():
                future.set_exception(TimeoutError())
        if self._latest_stats is not None:
            # counters go on where they were; nothing runs and nothing is held until the next worker
            # tells
            self._previous_stats, self._latest_stats = (
                _add_counters(self._latest_stats, self._previous_stats),
                _stats_between_workers(self._latest_stats),
            )

    # -- messages

    def _send(self, message: Message) -> None:
        self._write(encode(message))

    def _write(self, frame: bytes) -> None:
        if self._writer is not None:
            self._writer.write(frame)

    def _handle(self, message: Message) -> None:
        if isinstance(message, StepTokens):
            for token in message.tokens:
                self._on_token(token)
        elif isinstance(message, StatsReply):
            self._latest_stats = Stats(**message.stats)
            future = self._stats_futures.get(message.number)
            if future is not None and not future.done():
                future.set_result(self._latest_stats)
        elif isinstance(message, RequestStarted):
            if self.metrics is not None:
                self.metrics.observe_queue_time(message.queue_seconds)
            running = self._active_requests.get(message.id)
            if running is not None and running[1].queue_seconds is None:
                running[1].queue_seconds = message.queue_seconds
        elif isinstance(message, LoadingUpdate):
            self.progress = LoadProgress(message.stage, message.done, message.total)
        elif isinstance(message, RequestRejected):
            entry = self._remove_request(message.id)
            if entry is not None:
                if self.metrics is not None:
                    self.metrics.record_aborted(entry[0], "error")
                entry[1].fail(
                    (CapacityError if message.out_of_memory else RequestError)(message.message)
                )
        elif isinstance(message, (SegmentResult, SegmentFailure)):
            self.segment_client.handle(message)
        elif isinstance(message, OpenFailed):
            self.error, self.is_usage_error = message.message, message.is_usage_error

    def _on_token(self, token: TokenOutput) -> None:
        entry = self._active_requests.get(token.request_id)
        if entry is None:
            return
        dialogue, ticket = entry
        try:
            self._deliver_token(dialogue, ticket, token)
        except Exception as error:
            # a bug that one answer meets ends that answer; who waits for it raises it again, which
            # logs it
            ticket.fail(error)

    def _deliver_token(
        self, request_state: RequestState, handle: RequestHandle, token: TokenOutput
    ) -> None:
        if request_state.output.outputs[token.index].finish_reason is not None:
            # a stop string has ended it, which the worker did not know yet
            return
        before = request_state.token_counts(token.index)
        delta, stopped = request_state.process(token)
        if self.metrics is not None:
            self.metrics.record_delta(request_state, delta, before)
        if stopped:
            self._send(FinishSequence(token.request_id, token.index))
        if request_state.output.finished:
            self._remove_request(token.request_id)
        if token.finish_reason is FinishReason.ABORT:
            handle.fail(CapacityError("the engine has no memory left for this request; shorten it"))
            return
        if token.finish_reason is FinishReason.ERROR:
            handle.fail(RequestError(GRAMMAR_LOST))
            return
        handle.add_delta(
            token.request_id, delta, 1 + len(token.logprobs or ()) + len(token.replayed_ids or ())
        )

    def _remove_request(self, id: str) -> tuple[RequestState, RequestHandle] | None:
        entry = self._active_requests.pop(id, None)
        if entry is not None:
            self._num_sequences -= entry[0].request.params.n
        return entry

    def _abort_requests(self, ids: Sequence[str]) -> None:
        for id in ids:
            entry = self._remove_request(id)
            if entry is not None:
                self._send(AbortRequest(id))
                if self.metrics is not None:
                    self.metrics.record_aborted(entry[0], entry[1].abort_reason)


def max_tokenize_tokens(max_model_len: int) -> int:
    """Tokens of one text of a request: twice what the engine takes, for who counts what is too
    long.
    """
    return max(2 * max_model_len, MIN_TOKENIZE_LIMIT)


async def read_messages(reader: asyncio.StreamReader) -> AsyncIterator[list[Message]]:
    """Messages as they come, those that came together at once; ends with the connection.

    Raises ConnectionError.
    """
    held = bytearray()
    while piece := await reader.read(READ_CHUNK_BYTES):
        held += piece
        messages = decode_frames(held)
        if messages:
            yield messages


def _safe_error_text(error: Exception) -> str:
    """What may be told of an error: the system's own words for its errors, else no text, which may
    hold anything.
    """
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


def _zero_stats(num_pages: int) -> Stats:
    """Of a loop that has done nothing yet."""
    return Stats(0, 0, num_pages, num_pages, 0, 0, 0, 0, 0, 0)


def _stats_between_workers(last: Stats) -> Stats:
    """Of an engine between two workers: its limits, and nothing in them."""
    return replace(_zero_stats(last.pages), kept_pages=last.kept_pages, page_bytes=last.page_bytes)


def _add_counters(now: Stats, before: Stats) -> Stats:
    """Gauges of now, counters of both."""
    return replace(
        now,
        steps=now.steps + before.steps,
        prompt_tokens=now.prompt_tokens + before.prompt_tokens,
        output_tokens=now.output_tokens + before.output_tokens,
        cached_tokens=now.cached_tokens + before.cached_tokens,
        preemptions=now.preemptions + before.preemptions,
    )

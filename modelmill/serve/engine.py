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
from modelmill.core.errors import GRAMMAR_LOST, CapacityError, ModelmillError, RequestError, UsageError
from modelmill.core.types import Finish, Token
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.runtime.check import Bounds, check
from modelmill.runtime.stats import Stats
from modelmill.serve import budget
from modelmill.serve.child import Child, Launch, launch
from modelmill.serve.message import (
    Abort,
    Add,
    Ask,
    Begun,
    Count,
    End,
    Failed,
    Loading,
    Message,
    Open,
    Ping,
    Ready,
    Refused,
    Told,
    encode,
    unpacked,
)
from modelmill.serve.metrics import EngineMetrics
from modelmill.serve.pictures import KIND, Found, Look, Missed
from modelmill.serve.sight import Glance, Sight
from modelmill.serve.ticket import Ticket, WorkerLost
from modelmill.serve.watchdog import Watchdog

SHORT = 30.0
"""A worker that lived for fewer seconds counts as a failed start."""
TRIES = 5
UNKILLABLE = 30.0
"""Seconds in which the system has to end a process that was killed."""
AT_ONCE = 16 << 10
"""Bytes that are read together: five steps of 64 answers. An API that is behind writes them as one piece."""
MOST_TOKENS = 16384
"""Tokens of a text that is split or told, of any engine."""
_log = log.get("serve")


class State(StrEnum):
    """Where an engine stands."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class NotReady(ModelmillError):
    """The engine is loading or restarting."""


class Ending(NotReady):
    """The server is being shut down."""


class Busy(CapacityError):
    """As many requests wait as may."""


@dataclass(frozen=True)
class Progress:
    """How far loading has come; done and total in the stage's own unit."""

    stage: str = "starting"
    done: int = 0
    total: int = 0


class Engine:
    """A worker and the requests it answers. Belongs to one asyncio event loop."""

    def __init__(
        self,
        name: str,
        order: Open,
        *,
        queue: int,
        start: Launch = launch,
        read: Callable[[Path, str | Path | None], Language] = Language.read,
        pause: float = 0.2,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """queue: sequences that may wait beyond those of a step. pause: seconds before the first restart.

        sleep: between two looks at whether the worker lives.
        """
        self.name, self.state, self.progress = name, State.LOADING, Progress()
        self.error: str | None = None
        self.usage = False
        self.restarts = 0
        self.facts: Ready | None = None
        self.since = int(time.time())
        self.settled = asyncio.Event()
        self._order, self._queue = order, queue
        self._start, self._read, self._pause = start, read, pause
        self._language: Language | None = None
        self._child: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: dict[str, tuple[Dialogue, Ticket]] = {}
        self._seqs = 0
        self._asked: dict[int, asyncio.Future[Stats]] = {}
        self._numbers = itertools.count()
        self._stats: Stats | None = None
        self._before = _idle(0)
        self._closing = False
        self._sleep = sleep
        self._hung = ""  # how the worker that is ended hung
        self.metrics: EngineMetrics | None = None
        self.sight = Sight(name, self._send, lambda id: self._send(Abort(id)))

    # -- asking

    @property
    def language(self) -> Language:
        """The engine's text side. Raises NotReady before it is known, RequestError where the engine has none."""
        self._check_kind("language")
        if self._language is None:
            raise NotReady(f"the engine {self.name} is still loading")
        return self._language

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def bounds(self) -> Bounds:
        """What requests are checked against. Raises NotReady, RequestError for an engine that writes no text."""
        facts = self._ready()
        self._check_kind("language")
        return Bounds(facts.vocab, facts.max_model_len, facts.pages * facts.page_size, facts.seqs)

    @property
    def kind(self) -> str | None:
        """What the engine does; None before that is known."""
        return None if self.facts is None else self.facts.kind

    @property
    def reads(self) -> list[str]:
        """What a request may hold; nothing before that is known."""
        if self.kind == KIND:
            return ["image"]
        return [] if self._language is None else ["text", "image"] if self._language.sees else ["text"]

    @property
    def chats(self) -> bool | None:
        """Whether it has a chat template; None before that is known."""
        if self.kind == KIND:
            return False
        return None if self._language is None else self._language.chat_format is not None

    @property
    def sampling(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """How answers are drawn where a request does not say, and where the page's user does not; None: not known."""
        if self._language is None:
            return None
        return self._language.generation.told(), self._language.suggested.told()

    @property
    def _kv_bytes(self) -> tuple[int, int]:
        """What the KV cache may take on all ranks together, and kept prefixes of it."""
        facts = self._ready()
        page = facts.page_bytes * self._order.run.get("tp", 1)
        return facts.pages * page, facts.kept_pages * page

    @property
    def memory(self) -> str:
        """One line about its KV cache; empty for an engine without one. Raises NotReady."""
        facts = self._ready()
        return "" if facts.kind == KIND else budget.told(facts.device, facts.pages * facts.page_size, *self._kv_bytes)

    def check_sees(self) -> None:
        """Raises NotReady, RequestError for an engine that does not segment."""
        self._ready()
        self._check_kind(KIND)

    def _ready(self) -> Ready:
        if self.state is not State.READY or self.facts is None:
            raise NotReady(f"the engine {self.name} is {self.state.value}; try again soon")
        return self.facts

    def _check_kind(self, wanted: str) -> None:
        if self.kind not in (None, wanted):
            does = "segments images: ask it at /v1/segment" if self.kind == KIND else "writes text, it does not segment"
            raise RequestError(f"model {self.name} {does}")

    def look(self, look: Look) -> Glance:
        """Ask a segmentation engine. Raises RequestError, NotReady, Busy where too much waits."""
        self.check_sees()
        if self.sight.full(look, self._queue + 1):
            raise Busy(f"the engine {self.name} has {len(self.sight)} pictures to look at; try again soon")
        return self.sight.submit(look)

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait."""
        return self._queue + (self.facts.seqs if self.facts is not None else 0)

    def check_room(self, answers: int) -> None:
        """Whether so many could be queued now, before anything is made of them. Raises RequestError, Busy."""
        if answers > self.capacity:
            raise RequestError(f"{answers} answers at once are more than the {self.capacity} this server queues")
        if self._seqs + answers > self.capacity:
            raise Busy(f"the engine {self.name} has {self._seqs} answers to give; try again soon")

    def frames(self, dialogues: Sequence[Dialogue]) -> list[bytes]:
        """What the worker is sent for each request; long prompts take milliseconds: not for the event loop.

        Raises RequestError for what can never be served, NotReady without a worker.
        """
        bounds = self.bounds
        for dialogue in dialogues:
            check(dialogue.request, bounds)
        return [encode(Add(dialogue.request)) for dialogue in dialogues]

    def submit(self, dialogues: Sequence[Dialogue], frames: Sequence[bytes] | None = None) -> Ticket:
        """Queue requests, all or none. frames: ``frames`` of them, where they are made already.

        Raises as ``frames``, and Busy where too many wait.
        """
        self._ready()
        frames = self.frames(dialogues) if frames is None else frames
        ticket = Ticket(dialogues, self._abandon)
        self.check_room(ticket.weight)
        for dialogue, frame in zip(dialogues, frames, strict=True):
            self._running[dialogue.request.id] = dialogue, ticket
            self._seqs += dialogue.request.params.n
            self._write(frame)
        return ticket

    async def stats(self, seconds: float = 1.0) -> Stats | None:
        """Counters since the server was started and gauges of now; of the last time where the worker is slow to tell.

        None before the first.
        """
        if self._writer is not None and self.state is State.READY:
            number = next(self._numbers)
            future = self._asked[number] = asyncio.get_running_loop().create_future()
            self._send(Ask(number))
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(future, seconds)
            finally:
                self._asked.pop(number, None)
        return None if self._stats is None else _plus(self._stats, self._before)

    def abort_all(self, why: str) -> None:
        """End every request with an error."""
        for _, ticket in list(self._running.values()):
            ticket.fail(Ending(why))
        self.sight.fail_all(Ending(why))

    # -- the worker's life

    async def run(self) -> None:
        """Keep a worker alive until ``close``. Returns as well where none can be started: state FAILED, ``error``."""
        short = 0
        try:
            while not self._closing:
                began, code, self._hung = time.monotonic(), None, ""
                try:
                    code = await self._life()
                    end = self._hung or f"ended with status {code}"
                except Exception as error:
                    # a system that has nothing left to start one with, or a bug of ours: this worker is lost, no more
                    end = f"failed: {_kind(error)}"
                    _log.exception("worker failed", extra={"data": {"engine": self.name, "why": _kind(error)}})
                if self._closing:
                    break
                short = short + 1 if time.monotonic() - began < SHORT else 0
                if self.facts is None or short >= TRIES:
                    self.error = self.error or f"the worker of {self.name} {end}"
                    self.state = State.FAILED
                    return
                self.restarts += 1
                if self.metrics is not None:
                    self.metrics.restarted("hung" if self._hung else "ended")
                _log.error("worker ended", extra={"data": {"engine": self.name, "status": code, "again": True}})
                await asyncio.sleep(self._pause * 2 ** min(short, 6))
            if self.state is not State.FAILED:
                self.state = State.STOPPED
        finally:
            self.settled.set()

    async def close(self) -> None:
        """End the worker; what it answers ends with an error."""
        self._closing = True
        if self._child is not None:
            self._child.kill()

    async def _life(self) -> int:
        """One worker from start to end; returns its exit code. Raises OSError where none can be started."""
        sock, self._child = await self._start()
        if self._closing:
            # nobody could end it while it was being started
            self._child.kill()
        dog, watch = Watchdog(self._order.watchdog, lambda: self._send(Ping()), self._sleep), None
        try:
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._send(self._again())
            watch = asyncio.create_task(self._watch(dog, self._writer, self._child))
            async for messages in received(reader):
                dog.heard()
                for message in messages:
                    if isinstance(message, Ready):
                        with dog.deaf():
                            await self._opened(message)
                    else:
                        self._hear(message)
                # who waits for these has his turn before the next
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            if watch is not None:
                watch.cancel()
            child, self._child = self._child, None
            child.kill()
            if self._writer is None:
                sock.close()
            self._lost()
            code = await self._end_of(child)
        return code

    async def _end_of(self, child: Child) -> int:
        """The exit code of a worker that was killed. Raises ConnectionAbortedError where none comes, and says why."""
        try:
            return await asyncio.wait_for(child.wait(), UNKILLABLE)
        except TimeoutError:
            # a driver or a disk that does not answer: neither a restart nor the server's end may wait for it
            why = f"{self._hung or 'ended'}, and the system cannot end its process {child.pid}"
            self.error = f"the worker of {self.name} {why}"
            self.state, self._closing = State.FAILED, True
            raise ConnectionAbortedError from None

    async def _watch(self, dog: Watchdog, writer: asyncio.StreamWriter, child: Child) -> None:
        """End a worker that hangs; ``_life`` then goes on as if it had died."""
        seconds = await dog.hung()
        self._hung = f"gave no sign of life for {seconds:g} s"
        data = {"engine": self.name, "seconds": seconds, "pid": child.pid, "answers": self._seqs}
        _log.error("worker hung", extra={"data": data})
        child.kill()
        # one that the system cannot end at once is not waited for: who asked is told now
        writer.transport.abort()

    def _again(self) -> Open:
        """The order for a worker; one that follows another takes the same memory again."""
        if self.facts is None or self.facts.kind == KIND:
            return self._order
        run = {**self._order.run, "kv_cache_bytes": (self.facts.pages + 1) * self.facts.page_bytes}
        if self.facts.kept_pages:
            run["prefix_cache_bytes"] = self.facts.kept_pages * self.facts.page_bytes
        return replace(self._order, run=run)

    async def _opened(self, facts: Ready) -> None:
        if self._language is None and facts.kind != KIND:
            try:
                language = await asyncio.to_thread(self._read, Path(facts.path), self._order.template)
                language.most_pixels = self._order.most_pixels
                if language.tokenizer is not None:
                    language.tokenizer.most = most_tokens(facts.max_model_len)
                self._language = language
            except ModelmillError as error:
                self.error, self.usage, self._closing = str(error), isinstance(error, UsageError), True
                self.state = State.FAILED
                raise ConnectionAbortedError from None
            if (unused := language.generation.warning()) is not None:
                _log.warning("generation_config", extra={"data": {"engine": self.name, "why": unused}})
        self.facts, self.state, self.error = facts, State.READY, None
        self.settled.set()
        data = {"engine": self.name, "device": facts.device, "pages": facts.pages}
        if facts.kind != KIND:
            data["kv_cache_bytes"], data["prefix_cache_bytes"] = self._kv_bytes
        _log.info("ready", extra={"data": data})

    def lost(self) -> WorkerLost:
        """What who waits is told when the worker is gone."""
        return WorkerLost(f"the engine {self.name} {self._hung or 'ended'} while it answered; it is being restarted")

    def _lost(self) -> None:
        """The worker is gone: everyone who waits is told."""
        if self.state is State.READY:
            self.state = State.RESTARTING
        self.progress = Progress()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        lost = self.lost()
        for _, ticket in list(self._running.values()):
            ticket.fail(lost)
        self.sight.fail_all(lost)
        self._running.clear()
        self._seqs = 0
        for future in self._asked.values():
            if not future.done():
                future.set_exception(TimeoutError())
        if self._stats is not None:
            # counters go on where they were; nothing runs and nothing is held until the next worker tells
            self._before, self._stats = _plus(self._stats, self._before), _resting(self._stats)

    # -- messages

    def _send(self, message: Message) -> None:
        self._write(encode(message))

    def _write(self, frame: bytes) -> None:
        if self._writer is not None:
            self._writer.write(frame)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Told):
            for token in message.tokens:
                self._push(token)
        elif isinstance(message, Count):
            self._stats = Stats(**message.stats)
            future = self._asked.get(message.number)
            if future is not None and not future.done():
                future.set_result(self._stats)
        elif isinstance(message, Begun):
            if self.metrics is not None:
                self.metrics.queue(message.seconds)
            running = self._running.get(message.id)
            if running is not None and running[1].queued is None:
                running[1].queued = message.seconds
        elif isinstance(message, Loading):
            self.progress = Progress(message.stage, message.done, message.total)
        elif isinstance(message, Refused):
            entry = self._forget(message.id)
            if entry is not None:
                if self.metrics is not None:
                    self.metrics.broken_off(entry[0], "error")
                entry[1].fail((CapacityError if message.memory else RequestError)(message.message))
        elif isinstance(message, (Found, Missed)):
            self.sight.hear(message)
        elif isinstance(message, Failed):
            self.error, self.usage = message.message, message.usage

    def _push(self, token: Token) -> None:
        entry = self._running.get(token.request)
        if entry is None:
            return
        dialogue, ticket = entry
        try:
            self._tell(dialogue, ticket, token)
        except Exception as error:
            # a bug that one answer meets ends that answer; who waits for it raises it again, which logs it
            ticket.fail(error)

    def _tell(self, dialogue: Dialogue, ticket: Ticket, token: Token) -> None:
        if dialogue.answer.outputs[token.index].finish_reason is not None:
            # a stop string has ended it, which the worker did not know yet
            return
        before = dialogue.counts(token.index)
        delta, stopped = dialogue.push(token)
        if self.metrics is not None:
            self.metrics.told(dialogue, delta, before)
        if stopped:
            self._send(End(token.request, token.index))
        if dialogue.answer.finished:
            self._forget(token.request)
        if token.finish is Finish.ABORT:
            ticket.fail(CapacityError("the engine has no memory left for this request; shorten it"))
            return
        if token.finish is Finish.ERROR:
            ticket.fail(RequestError(GRAMMAR_LOST))
            return
        ticket.tell(token.request, delta, 1 + len(token.logprobs or ()) + len(token.replay or ()))

    def _forget(self, id: str) -> tuple[Dialogue, Ticket] | None:
        entry = self._running.pop(id, None)
        if entry is not None:
            self._seqs -= entry[0].request.params.n
        return entry

    def _abandon(self, ids: Sequence[str]) -> None:
        for id in ids:
            entry = self._forget(id)
            if entry is not None:
                self._send(Abort(id))
                if self.metrics is not None:
                    self.metrics.broken_off(entry[0], entry[1].broken_off)


def most_tokens(longest: int) -> int:
    """Tokens of one text of a request: twice what the engine takes, for who counts what is too long."""
    return max(2 * longest, MOST_TOKENS)


async def received(reader: asyncio.StreamReader) -> AsyncIterator[list[Message]]:
    """Messages as they come, those that came together at once; ends with the connection. Raises ConnectionError."""
    held = bytearray()
    while piece := await reader.read(AT_ONCE):
        held += piece
        messages = unpacked(held)
        if messages:
            yield messages


def _kind(error: Exception) -> str:
    """What may be told of an error: the system's own words for its errors, else no text, which may hold anything."""
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


def _idle(pages: int) -> Stats:
    """Of a loop that has done nothing yet."""
    return Stats(0, 0, pages, pages, 0, 0, 0, 0, 0, 0)


def _resting(last: Stats) -> Stats:
    """Of an engine between two workers: its limits, and nothing in them."""
    return replace(_idle(last.pages), kept_pages=last.kept_pages, page_bytes=last.page_bytes)


def _plus(now: Stats, before: Stats) -> Stats:
    """Gauges of now, counters of both."""
    return replace(
        now,
        steps=now.steps + before.steps,
        prompt_tokens=now.prompt_tokens + before.prompt_tokens,
        output_tokens=now.output_tokens + before.output_tokens,
        cached_tokens=now.cached_tokens + before.cached_tokens,
        preemptions=now.preemptions + before.preemptions,
    )

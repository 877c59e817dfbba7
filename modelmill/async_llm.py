"""AsyncLLM: the asyncio API; many callers stream at once, one thread steps the engine."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from modelmill.core.api_options import copy_signature_from
from modelmill.core.errors import ModelmillError
from modelmill.core.types import MEAN_POOLING, SamplingParams, SleepOrWakeReport
from modelmill.core.unknown_keywords import check_option_names
from modelmill.llm import LLM, LLMOptions
from modelmill.opened_engine import make_closed_error
from modelmill.outputs import OutputDelta, RequestOutput, stack_normalized_embeddings
from modelmill.request_output_state import RequestOutputState
from modelmill.text_processor import Messages, Prompt, as_prompt_list

_DeltaCallback = Callable[[OutputDelta | BaseException | None], None]


class AsyncLLM:
    """An opened engine for asyncio: ``async for delta in engine.stream(prompt)``.

    Leaving the loop early aborts the request. Takes the arguments of LLM. All methods but ``close``
    must be called from an asyncio event loop; several loops may share one engine. ``async with
    AsyncLLM(path) as engine:`` closes the engine at the end of the block. Every call on a closed
    AsyncLLM raises UsageError.
    """

    @copy_signature_from(LLM.__init__)
    def __init__(self, model: str | Path, **options: Unpack[LLMOptions]) -> None:
        check_option_names(options, LLMOptions.__annotations__, type(self).__name__)
        self.llm = LLM(model, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, RequestOutputState] = {}
        self._listeners: dict[str, _DeltaCallback] = {}
        self._closed, self._close_lock = False, threading.Lock()
        self._thread = threading.Thread(
            target=self._run_engine_loop, name="modelmill-engine", daemon=True
        )
        self._thread.start()

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[OutputDelta]:
        """Yield the deltas of one request as they arrive. Raises what LLM.stream raises."""
        async with contextlib.aclosing(
            self.stream_request(self.llm.request(prompt, params, **template))
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_request(self, state: RequestOutputState) -> AsyncGenerator[OutputDelta]:
        """Yield the deltas of a request from ``llm.request``, which any thread may make."""
        loop = asyncio.get_running_loop()
        items = asyncio.Queue[OutputDelta | BaseException | None]()
        id = state.request.id

        def send(item: OutputDelta | BaseException | None) -> None:
            # the caller's event loop may be closed: this must not end the engine thread
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(items.put_nowait, item)

        with self._close_lock:  # a command queued after close() would never be read
            if self._closed or not self._thread.is_alive():
                raise make_closed_error(self, self.llm.path)
            self._commands.put(lambda: self._add_request(state, send))
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.abort(id)

    async def generate(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> RequestOutput:
        """Complete one prompt or conversation and return the whole output."""
        output: RequestOutput | None = None
        async for delta in self.stream(prompt, params, **template):
            output = delta.output
        assert output is not None, "a stream ends with a delta"
        return output

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = MEAN_POOLING,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Embed prompts in one batch: [N, H] float32 of length 1, as ``LLM.embed``."""
        requests = [
            self.llm.embedding_request(prompt, pooling) for prompt in as_prompt_list(prompts)
        ]
        tasks = [asyncio.create_task(self._await_final_output(request)) for request in requests]
        try:
            return stack_normalized_embeddings(await asyncio.gather(*tasks), dimensions)
        finally:
            for task in tasks:  # some still run if one has failed or the caller was cancelled
                task.cancel()

    async def _await_final_output(self, state: RequestOutputState) -> RequestOutput:
        async with contextlib.aclosing(self.stream_request(state)) as deltas:
            async for _ in deltas:
                pass
        return state.output

    async def sleep(self) -> SleepOrWakeReport:
        """Give the engine's memory back, as ``LLM.sleep``; no request may run."""
        return await self._run_on_engine_thread(self.llm.sleep)

    async def wake_up(self) -> SleepOrWakeReport:
        """Take the memory again, as ``LLM.wake_up``."""
        return await self._run_on_engine_thread(self.llm.wake_up)

    async def _run_on_engine_thread(
        self, call: Callable[[], SleepOrWakeReport]
    ) -> SleepOrWakeReport:
        """Call between two steps, unless the caller leaves before. Raises what ``call`` raises."""
        done: Future[SleepOrWakeReport] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller has left; from here on it cannot cancel the future any more
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        with self._close_lock:  # a command queued after close() would never be read
            if self._closed or not self._thread.is_alive():
                raise make_closed_error(self, self.llm.path)
            self._commands.put(run)
        return await asyncio.wrap_future(done)

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are ignored."""
        self._commands.put(lambda: self._drop_request(request_id))

    def close(self) -> None:
        """Abort all requests and stop the thread; calling it again does nothing."""
        with self._close_lock:
            self._closed = True
            self._commands.put(None)
        self._thread.join()
        self.llm.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    async def __aenter__(self) -> Self:
        self.llm.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        return self

    async def __aexit__(self, *_: object) -> None:
        # close() waits for the running step, so it must not run on the event loop
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return repr(self.llm).replace(type(self.llm).__name__, type(self).__name__, 1)

    # -- on the engine's thread
    # -------------------------------------------------------------------------------------

    def _run_engine_loop(self) -> None:
        while True:
            while not (self.llm.engine_core.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    self._fail_all_requests(ModelmillError("the engine was closed"))
                    return
                command()
            try:
                deltas = self.llm.step(self._running)
            except Exception as error:
                self._fail_all_requests(error)
                continue
            for delta in deltas:
                listener = self._listeners.get(delta.output.id)
                if listener is not None:
                    listener(delta)
                    if delta.output.finished:
                        self._listeners.pop(delta.output.id)(None)

    def _add_request(self, state: RequestOutputState, listener: _DeltaCallback) -> None:
        try:
            core = self.llm.engine_core
            core.add(state.request, partial(self.llm.language.make_guide, vocab=core.vocab))
        except Exception as error:
            # memory may run out while images are decoded: only this request must end
            listener(error)
            return
        self._running[state.request.id] = state
        self._listeners[state.request.id] = listener

    def _drop_request(self, id: str) -> None:
        if self._running.pop(id, None) is not None:
            self.llm.engine_core.abort(id)
        self._listeners.pop(id, None)

    def _fail_all_requests(self, error: BaseException) -> None:
        """Send ``error`` to every open request and abort them all."""
        for id, listener in list(self._listeners.items()):
            self.llm.engine_core.abort(id)
            listener(error)
        self._listeners.clear()
        self._running.clear()

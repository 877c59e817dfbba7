"""The engine for asyncio: many callers stream at once, one thread steps the loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.options import (
    BUILD_FIELDS,
    RUN_FIELDS,
    EngineOptions,
    accept_options,
    check_option_names,
)
from modelmill.core.types import POOL_MEAN, SamplingParams
from modelmill.llm import LLM, ProgressCallback
from modelmill.outputs import OutputDelta, RequestOutput
from modelmill.prompt_inputs import as_prompt_list, stack_embeddings
from modelmill.request_state import RequestState
from modelmill.text_processor import Messages, Prompt

_DeltaCallback = Callable[[OutputDelta | BaseException | None], None]


class AsyncLLM:
    """``async for delta in engine.stream(prompt)``; leaving the loop early aborts the request.

    Takes what LLM takes. All calls but ``close`` belong to an asyncio event loop; several loops may
    share one engine. ``async with AsyncLLM(path) as engine:`` closes it at the end; a closed one
    refuses every call with a UsageError."""

    @accept_options(RunConfig, BuildConfig)
    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int | None = None,
        chat_template: str | Path | None = None,
        progress: ProgressCallback | bool | None = None,
        openai_defaults: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_option_names(options, (*RUN_FIELDS, *BUILD_FIELDS), type(self).__name__)
        own: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size, "chat_template": chat_template,
            "progress": progress,
            "openai_defaults": openai_defaults,
        }  # fmt: skip
        self.llm = LLM(model, **own, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, RequestState] = {}
        self._listeners: dict[str, _DeltaCallback] = {}
        self._closed, self._close_lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="modelmill-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[OutputDelta]:
        """Deltas of one answer as they come. Raises what LLM.stream raises."""
        async with contextlib.aclosing(
            self.stream_request(self.llm.request(prompt, params, **template))
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_request(self, state: RequestState) -> AsyncGenerator[OutputDelta]:
        """Deltas of a request that was made before (``llm.request``), perhaps on another thread."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[OutputDelta | BaseException | None]()
        id = state.request.id

        def tell(item: OutputDelta | BaseException | None) -> None:
            # the asker's event loop may be gone; that must not take the engine's thread with it
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.put_nowait, item)

        with self._close_lock:  # behind the last command nobody would be heard
            if self._closed or not self._thread.is_alive():
                raise UsageError(
                    f"this {type(self).__name__} ({self.llm.path}) is closed; open the engine again"
                )
            self._commands.put(lambda: self._add(state, tell))
        try:
            while (item := await news.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.abort(id)

    async def generate(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> RequestOutput:
        """The whole answer to one prompt or conversation."""
        answer: RequestOutput | None = None
        async for delta in self.stream(prompt, params, **template):
            answer = delta.output
        assert answer is not None, "a stream ends with a delta"
        return answer

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = POOL_MEAN,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Vectors [N, H] float32 of length 1, as ``LLM.embed`` gives them; all prompts share a
        batch.
        """
        requests = [
            self.llm.embedding_request(prompt, pooling) for prompt in as_prompt_list(prompts)
        ]
        tasks = [asyncio.create_task(self._final_output(request)) for request in requests]
        try:
            return stack_embeddings(await asyncio.gather(*tasks), dimensions)
        finally:
            for task in tasks:  # of which one has failed, or the asker has gone
                task.cancel()

    async def _final_output(self, state: RequestState) -> RequestOutput:
        async with contextlib.aclosing(self.stream_request(state)) as deltas:
            async for _ in deltas:
                pass
        return state.output

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are ignored."""
        self._commands.put(lambda: self._drop(request_id))

    def close(self) -> None:
        """Abort everything and stop the thread; closing twice is closing once."""
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
        self.llm.engine_core  # noqa: B018 -- a closed one cannot be entered
        return self

    async def __aexit__(self, *_: object) -> None:
        # a step that runs ends first, and must not hold the event loop
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return repr(self.llm).replace(type(self.llm).__name__, type(self).__name__, 1)

    # -- on the engine's thread
    # -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            while not (self.llm.engine_core.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    self._fail(ModelmillError("the engine was closed"))
                    return
                command()
            try:
                deltas = self.llm.step(self._running)
            except Exception as error:
                self._fail(error)
                continue
            for delta in deltas:
                listener = self._listeners.get(delta.output.id)
                if listener is not None:
                    listener(delta)
                    if delta.output.finished:
                        self._listeners.pop(delta.output.id)(None)

    def _add(self, state: RequestState, listener: _DeltaCallback) -> None:
        try:
            self.llm.engine_core.add(state.request)
        except Exception as error:
            # memory may run out while pictures are read: that ends this request, and not the thread
            # and everybody's
            listener(error)
            return
        self._running[state.request.id] = state
        self._listeners[state.request.id] = listener

    def _drop(self, id: str) -> None:
        if self._running.pop(id, None) is not None:
            self.llm.engine_core.abort(id)
        self._listeners.pop(id, None)

    def _fail(self, error: BaseException) -> None:
        """Everyone who waits is told; the engine starts over empty."""
        for id, listener in list(self._listeners.items()):
            self.llm.engine_core.abort(id)
            listener(error)
        self._listeners.clear()
        self._running.clear()

"""An engine inside Triton Inference Server's Python backend: in-flight batching, streams and cancellation.

``execute`` only takes requests over. The engine's thread steps all of them together; an event loop on another thread
sends what comes, piece by piece, and looks who has left. Triton's own module is handed in, since it exists inside of
Triton's process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from modelmill.aio import AsyncLLM
from modelmill.answer import Delta
from modelmill.core.config import RunConfig, from_dict
from modelmill.core.errors import GRAMMAR_LOST, ModelmillError, RequestError, UsageError
from modelmill.export.triton_fields import INPUTS, OUTPUTS, Question, question
from modelmill.export.triton_metrics import Metrics
from modelmill.export.triton_repository import ENGINE, START, Start
from modelmill.language import Language

LOOK = 0.02
"""Seconds between two looks at who has cancelled."""


class Backend:
    """The requests of one instance."""

    def __init__(self, triton: Any, engine: AsyncLLM, waiting: int, labels: Mapping[str, str]) -> None:
        """triton: Triton's module. waiting: requests that may wait beyond those of a step. labels: of its metrics."""
        self._triton, self._engine = triton, engine
        self._metrics = Metrics(triton, labels)
        self._most = waiting + engine.llm.loop.bounds.seqs
        self._calls: dict[_Call, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="modelmill-triton", daemon=True)
        self._thread.start()

    @staticmethod
    def open(triton: Any, args: Mapping[str, str]) -> Backend:
        """args: what Triton gives ``initialize``. Raises Triton's own exception, in one line."""
        try:
            alone(json.loads(args["model_config"]))
            python()
            folder = Path(args["model_repository"]) / args["model_version"]
            start = Start.read(folder / START)
            run = placed(from_dict(RunConfig, start.run, str(folder / START)), args)
            engine = AsyncLLM(folder / ENGINE, chat_template=start.chat_template, openai_defaults=True, **_fields(run))
            engine.llm.loop.warm_up(forms=True)
        except ModelmillError as error:
            raise triton.TritonModelException(str(error)) from None
        labels = {"model": args["model_name"], "version": args["model_version"]}
        return Backend(triton, engine, start.waiting, labels)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests over. Triton is told of every answer through its request's sender."""
        for request in requests:
            call = _Call(self._triton, request)
            self._loop.call_soon_threadsafe(self._begin, call)

    def close(self) -> None:
        """End what runs, and the engine."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the event loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watch = self._loop.create_task(self._watch())
        self._loop.run_forever()
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(watch)

    def _begin(self, call: _Call) -> None:
        if len(self._calls) >= self._most:
            call.fail(f"the engine has {len(self._calls)} requests to answer; try again soon", "UNAVAILABLE")
            return
        task = self._loop.create_task(self._answer(call))
        self._calls[call] = task
        task.add_done_callback(lambda _: self._calls.pop(call, None))

    async def _answer(self, call: _Call) -> None:
        try:
            asked = question(call.given)
            language = self._engine.llm.language
            possible(asked, language, self._engine.llm.loop.bounds.longest)
            # long texts take time, and templates have a process of their own
            dialogue = await asyncio.to_thread(language.request, asked.prompt, asked.params)
            async with contextlib.aclosing(self._engine.follow(dialogue)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "abort":
                        call.fail("the engine has no memory left for this request; shorten it", "UNAVAILABLE")
                        return
                    if delta.finish_reason == "error":
                        call.fail(GRAMMAR_LOST, "INVALID_ARG")
                        return
                    if delta.finish_reason or (asked.stream and (delta.text or delta.token_ids)):
                        call.tell(delta, whole=not asked.stream)
        except asyncio.CancelledError:
            call.fail("the request was cancelled", "CANCELLED")
        except UsageError as error:
            call.fail(str(error), "INVALID_ARG")
        except ModelmillError as error:
            call.fail(str(error), "UNAVAILABLE")
        except Exception as error:
            # its text may hold anything, a prompt too: kind and place go to the log, nothing to the client
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._triton.Logger.log_error(f"modelmill: {type(error).__name__} at {where.filename}:{where.lineno}")
            call.fail("something went wrong in the engine; the server's log says what", "INTERNAL")

    async def _watch(self) -> None:
        """Whoever has left is answered no more; the engine drops the request before its next step."""
        while True:
            await asyncio.sleep(LOOK)
            self._metrics.show(self._engine.llm.loop.stats())
            for call, task in list(self._calls.items()):
                if call.left:
                    task.cancel()

    async def _end(self) -> None:
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Call:
    """One request of Triton's."""

    def __init__(self, triton: Any, request: Any) -> None:
        self._triton, self._sender = triton, request.get_response_sender()
        tensors = ((field.name, triton.get_input_tensor_by_name(request, field.name)) for field in INPUTS)
        # copies: the memory is Triton's
        self.given = {name: tensor.as_numpy().copy() for name, tensor in tensors if tensor is not None}
        self._open = True

    @property
    def left(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._open and bool(self._sender.is_cancelled())

    def tell(self, delta: Delta, whole: bool) -> None:
        """A piece of the answer, or all of it; the last one ends the request."""
        output = delta.answer.outputs[0]
        text, ids = (output.text, output.token_ids) if whole else (delta.text, delta.token_ids)
        values = (
            numpy.array([text.encode()], dtype=numpy.object_),
            numpy.array(list(ids), dtype=numpy.int32),
            numpy.array([(delta.finish_reason or "").encode()], dtype=numpy.object_),
        )
        tensors = [self._triton.Tensor(field.name, value) for field, value in zip(OUTPUTS, values, strict=True)]
        self._send(self._triton.InferenceResponse(output_tensors=tensors), last=delta.finish_reason is not None)

    def fail(self, message: str, code: str) -> None:
        """End the request with an error. code: of TritonError."""
        error = self._triton.TritonError(" ".join(message.split()), getattr(self._triton.TritonError, code))
        self._send(self._triton.InferenceResponse(output_tensors=[], error=error), last=True)

    def _send(self, response: Any, last: bool) -> None:
        if not self._open:
            return
        self._open = not last
        self._sender.send(response, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


def possible(asked: Question, language: Language, longest: int) -> None:
    """Raises RequestError for what this engine cannot read, and for what is too long however it would be split."""
    prompt: Any = asked.prompt
    if not isinstance(prompt, Mapping):
        if language.chat_format is None:
            raise RequestError("messages need a chat template, which this engine has not; give text_input")
        texts = [each["content"] for each in prompt if isinstance(each.get("content"), str)]
    else:
        if language.tokenizer is None and ("prompt" in prompt or asked.params.stop):
            raise RequestError("this engine has no tokenizer; give input_ids, and stop_token_ids instead of stop")
        texts = list(prompt.values())[:1]
    for text in texts:
        language.check_size(text, longest)


def alone(config: Mapping[str, Any]) -> None:
    """Raises UsageError for a configuration with two instances on one device: they would not share their steps."""
    found: Counter[str] = Counter()
    for group in config.get("instance_group", ()):
        kind, count = group.get("kind", "KIND_AUTO"), group.get("count", 1)
        for place in group.get("gpus") or [0] if kind == "KIND_GPU" else [0]:
            found[f"GPU {place}" if kind == "KIND_GPU" else "the host"] += count
    for place, count in found.items():
        if count > 1:
            raise UsageError(
                f"{count} instances on {place}: each would hold an engine of its own, while requests share the steps "
                "of one; set count to 1 in config.pbtxt"
            )


def placed(run: RunConfig, args: Mapping[str, str]) -> RunConfig:
    """``run`` on the device that Triton gave the instance, where it gives one."""
    kind = args.get("model_instance_kind")
    if kind == "GPU":
        return replace(run, device=f"cuda:{args['model_instance_device_id']}")
    return replace(run, device="cpu") if kind == "CPU" else run


def python() -> None:
    """Ranks and chat templates start Python by ``sys.executable``, which is Triton's stub here, or nothing."""
    if Path(sys.executable or "stub").name.startswith("python"):
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = next((path for name in (version, "python3") if (path := Path(sys.prefix, "bin", name)).is_file()), None)
    if found is None:
        raise UsageError(f"there is no Python in {sys.prefix}/bin; start Triton with the PYTHONHOME of its interpreter")
    sys.executable = str(found)


def _fields(run: RunConfig) -> dict[str, Any]:
    default = RunConfig()
    return {name: value for name, value in vars(run).items() if value != getattr(default, name)}

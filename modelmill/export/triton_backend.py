"""An engine in Triton Inference Server's Python backend: in-flight batching, streams, cancellation.

``execute`` only queues requests. The engine's thread steps all of them together; an event loop on
another thread sends the results and checks for cancelled requests. Triton's Python module is passed
in, because it exists only inside Triton's process.
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

from modelmill.async_llm import AsyncLLM
from modelmill.core.config import RunConfig, config_from_dict, non_default_fields
from modelmill.core.errors import (
    GRAMMAR_TOO_COSTLY_MESSAGE,
    ModelmillError,
    RequestError,
    UsageError,
)
from modelmill.export.triton_metrics import TritonMetrics
from modelmill.export.triton_repository import ENGINE_DIR, START_OPTIONS_FILE, EngineStartOptions
from modelmill.export.triton_tensors import (
    INPUT_TENSORS,
    OUTPUT_TENSORS,
    ParsedRequest,
    parse_request,
)
from modelmill.outputs import OutputDelta
from modelmill.text_processor import TextProcessor

CANCEL_POLL_SECONDS = 0.02
"""Seconds between two checks for cancelled requests."""


class TritonBackend:
    """The requests of one instance."""

    def __init__(
        self, triton: Any, async_llm: AsyncLLM, max_waiting: int, metric_labels: Mapping[str, str]
    ) -> None:
        """Start the event loop.

        Args:
            triton: Triton's Python module.
            async_llm: the engine.
            max_waiting: requests that may wait beyond those of a step.
            metric_labels: of every metric.
        """
        self._triton, self._async_llm = triton, async_llm
        self._metrics = TritonMetrics(triton, metric_labels)
        self._max_requests = max_waiting + async_llm.llm.engine_core.request_limits.max_seqs
        self._active_requests: dict[_TritonRequest, asyncio.Task[None]] = {}
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run_event_loop, name="modelmill-triton", daemon=True
        )
        self._thread.start()

    @staticmethod
    def open(triton: Any, args: Mapping[str, str]) -> TritonBackend:
        """Open the engine of a model repository.

        Args:
            triton: Triton's Python module.
            args: what Triton passes to ``initialize``.

        Raises:
            TritonModelException: the engine cannot be opened; one line.
        """
        try:
            check_one_instance_per_device(json.loads(args["model_config"]))
            set_python_executable()
            folder = Path(args["model_repository"]) / args["model_version"]
            start = EngineStartOptions.read(folder / START_OPTIONS_FILE)
            run = with_triton_device(
                config_from_dict(RunConfig, start.run, str(folder / START_OPTIONS_FILE)), args
            )
            engine = AsyncLLM(
                folder / ENGINE_DIR,
                chat_template=start.chat_template,
                openai_defaults=True,
                **non_default_fields(run),
            )
            engine.llm.engine_core.warm_up(all_specializations=True)
        except ModelmillError as error:
            raise triton.TritonModelException(str(error)) from None
        labels = {"model": args["model_name"], "version": args["model_version"]}
        return TritonBackend(triton, engine, start.waiting, labels)

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue requests; each is answered through its response sender."""
        for request in requests:
            triton_request = _TritonRequest(self._triton, request)
            self._event_loop.call_soon_threadsafe(self._start_request, triton_request)

    def close(self) -> None:
        """Cancel running requests and close the engine."""
        asyncio.run_coroutine_threadsafe(self._cancel_all_requests(), self._event_loop).result()
        self._async_llm.close()
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()

    # -- on the event loop

    def _run_event_loop(self) -> None:
        asyncio.set_event_loop(self._event_loop)
        poll_task = self._event_loop.create_task(self._poll_cancellations_and_metrics())
        self._event_loop.run_forever()
        poll_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._event_loop.run_until_complete(poll_task)

    def _start_request(self, request: _TritonRequest) -> None:
        if len(self._active_requests) >= self._max_requests:
            request.fail(
                f"the engine has {len(self._active_requests)} requests queued; try again soon",
                "UNAVAILABLE",
            )
            return
        task = self._event_loop.create_task(self._run_request(request))
        self._active_requests[request] = task
        task.add_done_callback(lambda _: self._active_requests.pop(request, None))

    async def _run_request(self, request: _TritonRequest) -> None:
        try:
            parsed = parse_request(request.inputs)
            text_processor = self._async_llm.llm.language
            check_request(
                parsed, text_processor, self._async_llm.llm.engine_core.request_limits.max_len
            )
            # on a thread: long texts take time, and templates run in another process
            state = await asyncio.to_thread(text_processor.request, parsed.prompt, parsed.params)
            async with contextlib.aclosing(self._async_llm.stream_request(state)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "abort":
                        request.fail(
                            "the engine has no memory left for this request; shorten it",
                            "UNAVAILABLE",
                        )
                        return
                    if delta.finish_reason == "error":
                        request.fail(GRAMMAR_TOO_COSTLY_MESSAGE, "INVALID_ARG")
                        return
                    if delta.finish_reason or (parsed.stream and (delta.text or delta.token_ids)):
                        request.send_output(delta, send_full_output=not parsed.stream)
        except asyncio.CancelledError:
            request.fail("the request was cancelled", "CANCELLED")
        except UsageError as error:
            request.fail(str(error), "INVALID_ARG")
        except ModelmillError as error:
            request.fail(str(error), "UNAVAILABLE")
        except Exception as error:
            # the text may contain anything, even a prompt: only the class and place are logged
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._triton.Logger.log_error(
                f"modelmill: {type(error).__name__} at {frame.filename}:{frame.lineno}"
            )
            request.fail("internal error of the engine; see the server's log", "INTERNAL")

    async def _poll_cancellations_and_metrics(self) -> None:
        """Cancel the tasks of cancelled requests, and update the metrics.

        The engine drops such a request before its next step.
        """
        while True:
            await asyncio.sleep(CANCEL_POLL_SECONDS)
            self._metrics.update(self._async_llm.llm.engine_core.stats())
            for request, task in list(self._active_requests.items()):
                if request.is_cancelled:
                    task.cancel()

    async def _cancel_all_requests(self) -> None:
        tasks = list(self._active_requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Backend = TritonBackend
"""Name imported by the model.py of repositories that earlier versions exported."""


class _TritonRequest:
    """One request of Triton."""

    def __init__(self, triton: Any, request: Any) -> None:
        self._triton, self._sender = triton, request.get_response_sender()
        tensors = (
            (field.name, triton.get_input_tensor_by_name(request, field.name))
            for field in INPUT_TENSORS
        )
        # copy: the memory belongs to Triton
        self.inputs = {
            name: tensor.as_numpy().copy() for name, tensor in tensors if tensor is not None
        }
        self._is_open = True

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._is_open and bool(self._sender.is_cancelled())

    def send_output(self, delta: OutputDelta, send_full_output: bool) -> None:
        """Send a delta or the full output; the last one ends the request."""
        output = delta.output.outputs[0]
        text, ids = (
            (output.text, output.token_ids) if send_full_output else (delta.text, delta.token_ids)
        )
        values = (
            numpy.array([text.encode()], dtype=numpy.object_),
            numpy.array(list(ids), dtype=numpy.int32),
            numpy.array([(delta.finish_reason or "").encode()], dtype=numpy.object_),
        )
        tensors = [
            self._triton.Tensor(field.name, value)
            for field, value in zip(OUTPUT_TENSORS, values, strict=True)
        ]
        self._send_response(
            self._triton.InferenceResponse(output_tensors=tensors),
            last=delta.finish_reason is not None,
        )

    def fail(self, message: str, code: str) -> None:
        """End the request with an error; ``code`` is one of TritonError's."""
        error = self._triton.TritonError(
            " ".join(message.split()), getattr(self._triton.TritonError, code)
        )
        self._send_response(
            self._triton.InferenceResponse(output_tensors=[], error=error), last=True
        )

    def _send_response(self, response: Any, last: bool) -> None:
        if not self._is_open:
            return
        self._is_open = not last
        self._sender.send(
            response, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        )


def check_request(
    request: ParsedRequest, text_processor: TextProcessor, max_model_len: int
) -> None:
    """Check a request before it is tokenized.

    Raises:
        RequestError: the engine cannot process its inputs, or it is too long in any tokenization.
    """
    prompt: Any = request.prompt
    if not isinstance(prompt, Mapping):
        if text_processor.chat_format is None:
            raise RequestError("this engine has no chat template for messages; give text_input")
        texts = [each["content"] for each in prompt if isinstance(each.get("content"), str)]
    else:
        if text_processor.tokenizer is None and ("prompt" in prompt or request.params.stop):
            raise RequestError(
                "this engine has no tokenizer; give input_ids, and stop_token_ids instead of stop"
            )
        texts = list(prompt.values())[:1]
    for text in texts:
        text_processor.check_prompt_length(text, max_model_len)


def check_one_instance_per_device(model_config: Mapping[str, Any]) -> None:
    """Check that there is one instance per device: instances cannot share steps.

    Raises:
        UsageError: a device has two.
    """
    counts: Counter[str] = Counter()
    for group in model_config.get("instance_group", ()):
        instance_kind, count = group.get("kind", "KIND_AUTO"), group.get("count", 1)
        for gpu in group.get("gpus") or [0] if instance_kind == "KIND_GPU" else [0]:
            counts[f"GPU {gpu}" if instance_kind == "KIND_GPU" else "the host"] += count
    for gpu, count in counts.items():
        if count > 1:
            raise UsageError(
                f"{count} instances on {gpu}: each would load its own engine, but only requests "
                "of one engine share steps; set count to 1 in config.pbtxt"
            )


def with_triton_device(run: RunConfig, args: Mapping[str, str]) -> RunConfig:
    """``run`` on the device that Triton assigned to the instance, if any."""
    instance_kind = args.get("model_instance_kind")
    if instance_kind == "GPU":
        return replace(run, device=f"cuda:{args['model_instance_device_id']}")
    return replace(run, device="cpu") if instance_kind == "CPU" else run


def set_python_executable() -> None:
    """Point ``sys.executable`` to Python: Triton sets it to its stub or to nothing.

    Ranks and chat templates start Python by it.

    Raises:
        UsageError: there is no Python in ``sys.prefix``.
    """
    if Path(sys.executable or "stub").name.startswith("python"):
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    executable = next(
        (
            path
            for name in (version, "python3")
            if (path := Path(sys.prefix, "bin", name)).is_file()
        ),
        None,
    )
    if executable is None:
        raise UsageError(
            f"there is no Python in {sys.prefix}/bin; start Triton with the PYTHONHOME of its "
            "interpreter"
        )
    sys.executable = str(executable)

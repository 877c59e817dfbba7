"""LLM: the Python API for text generation, chat and embeddings."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from modelmill.artifact.manifest import check_engine_type
from modelmill.artifact.store import is_engine_folder
from modelmill.core import log
from modelmill.core.api_options import (
    BUILD_ONLY_FIELDS,
    RUN_CONFIG_FIELDS,
    EngineOptions,
    describe_options,
    show_options_in_signature,
)
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.env import cache_dir
from modelmill.core.errors import UsageError
from modelmill.core.progress_callback import Progress
from modelmill.core.types import MEAN_POOLING, SamplingParams, SleepOrWakeReport
from modelmill.core.unknown_keywords import check_option_names, refuse_unknown_keywords
from modelmill.loader.device import ensure_cpu_kernels_compiled
from modelmill.opened_engine import (
    OpenedEngine,
    check_model_argument,
    show_opening_progress,
)
from modelmill.outputs import OutputDelta, RequestOutput, stack_normalized_embeddings
from modelmill.progress_display import show_progress
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime import sleep_mode
from modelmill.runtime.engine_core import EngineCore
from modelmill.text_processor import (
    Messages,
    Prompt,
    TextProcessor,
    as_prompt_list,
    check_no_sampling_keywords,
    check_sampling_params_type,
    params_per_prompt,
)

if TYPE_CHECKING:
    from modelmill.builder.plan import BuildPlan

_log = log.get_logger(__name__)
PROGRESS_DELAY_SECONDS = 1.0
"""Seconds of generation before a progress bar is shown."""


class LLMOptions(EngineOptions, total=False):
    """Keyword arguments of ``LLM``."""

    tensor_parallel_size: int | None
    chat_template: str | Path | None
    progress: Progress | bool | None
    openai_defaults: bool


class LLM(OpenedEngine[EngineCore]):
    """An opened engine: ``generate``, ``chat``, ``stream`` and ``embed``.

    ``with LLM(path) as llm:`` closes the engine at the end of the block. Every call on a closed
    LLM raises UsageError. Not thread-safe.

    Args:
        model: An engine folder; or a checkpoint, which is first built into the cache (a line on
            stderr reports it).
        tensor_parallel_size: Another name for ``tp``.
        chat_template: Replaces the engine's template: the name of a built-in one (chatml, …),
            a file, or the template text.
        progress: Called with (stage, done, total) while the engine is built, compiled and opened.
            None: shown on a terminal and in a notebook; False: never shown.
        openai_defaults: Sampling defaults where neither the checkpoint nor the request sets one:
            those of the OpenAI API, instead of those in ``core.generation_defaults``.
        options: Fields of RunConfig and BuildConfig, by name. They are listed below.

    Raises:
        UnknownOption: An option does not exist; it is a TypeError too.
        UsageError: An option does not apply, such as a build option for a built engine.
        ModelmillError: The checkpoint, the engine or the device cannot be used.
    """

    @show_options_in_signature(RunConfig, BuildConfig)
    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int | None = None,
        chat_template: str | Path | None = None,
        progress: Progress | bool | None = None,
        openai_defaults: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_option_names(options, (*RUN_CONFIG_FIELDS, *BUILD_ONLY_FIELDS), type(self).__name__)
        if tensor_parallel_size is not None:
            options = {"tp": tensor_parallel_size, **options}
        engine = check_model_argument(model)
        self.path = engine
        self._opened: EngineCore | None = None
        with show_opening_progress(engine, progress) as report:
            self._open(engine, chat_template, options, report, openai_defaults)

    def _open(
        self,
        engine: Path,
        chat_template: str | Path | None,
        options: EngineOptions,
        progress: Progress,
        openai_defaults: bool,
    ) -> None:
        build = {name: value for name, value in options.items() if name in BUILD_ONLY_FIELDS}
        run = {name: value for name, value in options.items() if name in RUN_CONFIG_FIELDS}
        config = RunConfig(**run)  # type: ignore[arg-type]
        ensure_cpu_kernels_compiled(config.device, progress)
        self.path = engine = resolve_or_build_engine(engine, build, progress)
        self._opened = core = EngineCore.open(engine, config)
        artifact = core.opened_artifact
        self.language = language = TextProcessor(
            engine,
            artifact.manifest,
            artifact.tokenizer_files(),
            chat_template,
            allow_local_files=True,
            openai_defaults=openai_defaults,
        )
        self.tokenizer, self.chat_format = language.tokenizer, language.chat_format
        self.defaults, self.eos_ids = language.defaults, language.eos_ids
        if (unused := language.generation_defaults.unused_warning()) is not None:
            _log.warning("%s", unused)
        self._running: dict[str, RequestOutputState] = {}
        self._delta_queues: dict[str, deque[OutputDelta]] = {}

    @property
    def engine_core(self) -> EngineCore:
        """The engine core. Raises UsageError once it is closed."""
        return self.opened_or_raise

    def close(self) -> None:
        """Free weights and KV cache and end the other ranks; calling it again does nothing.

        Open streams raise UsageError, as every later call does.
        """
        core, self._opened = self._opened, None
        if core is not None:
            core.close()

    def sleep(self) -> SleepOrWakeReport:
        """Move the weights to host memory and drop the KV cache, until ``wake_up``.

        The engine was opened with ``enable_sleep_mode=True``. Calls meanwhile raise RequestError.

        Raises:
            UsageError: it was not, or a stream is open.
            CapacityError: the host has not enough memory; the engine goes on.
        """
        return sleep_mode.sleep(self.engine_core)

    def wake_up(self) -> SleepOrWakeReport:
        """Move the weights back; CUDA graphs stay valid, the prefix cache is empty.

        Raises:
            UsageError: the engine was opened without sleep mode.
            CapacityError: the GPU has not enough memory now; the engine still sleeps.
        """
        return sleep_mode.wake_up(self.engine_core)

    def __repr__(self) -> str:
        if self._opened is None:
            return f"{type(self).__name__}({str(self.path)!r}, closed)"
        core, manifest = self._opened, self.language.manifest
        facts = {
            "model_type": manifest.model_type,
            "dtype": str(core.dtype).removeprefix("torch."),
            "quantization": manifest.build.get("quantization", "none"),
            "device": str(core.device),
            **({"tp": core.config.tp} if core.config.tp > 1 else {}),
            **({"enable_expert_parallel": True} if core.config.enable_expert_parallel else {}),
            "weights": format_bytes(manifest.weight_bytes),
            "max_model_len": core.max_model_len,
        }
        fields = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        return f"{type(self).__name__}({str(self.path)!r}, {fields})"

    # -- requests
    # ---------------------------------------------------------------------------

    @refuse_unknown_keywords("generate", check_no_sampling_keywords)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete raw prompts, all in one batch.

        A completion ends at ``max_tokens`` or when prompt and completion together reach
        ``max_model_len``, whichever comes first; its ``finish_reason`` is then "length".

        Args:
            prompts: One prompt or a list: text, {"prompt": text}, {"prompt_token_ids": ids} or a
                list of ids. A mapping may add "cache_salt": requests with different salts share no
                cached prefix.
            params: One SamplingParams for all prompts, or one per prompt.
            progress: Whether to show a bar. None: on a terminal (stderr) and in a notebook, once
                generation takes longer than a second.

        Returns:
            One RequestOutput per prompt, in order.
        """
        prompt_list = as_prompt_list(prompts)
        all_params = params_per_prompt(params, len(prompt_list))
        requests = [
            self.request(prompt, prompt_params)
            for prompt, prompt_params in zip(prompt_list, all_params, strict=True)
        ]
        return self._run_requests(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the engine's chat template, all in one batch.

        Args:
            messages: One conversation ([{"role", "content"}, …]) or a list of conversations.
            params: One SamplingParams for all conversations, or one per conversation.
            progress: As for ``generate``.
            template: Further variables of the chat template.

        Returns:
            One RequestOutput per conversation, in order.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        all_params = params_per_prompt(params, len(conversations))
        requests = [
            self.chat_request(conversation, chat_params, **template)  # type: ignore[arg-type]
            for conversation, chat_params in zip(conversations, all_params, strict=True)
        ]
        return self._run_requests(requests, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[OutputDelta]:
        """Yield the deltas of one request as they arrive; closing the iterator aborts it."""
        return self._step_until_done([self.request(prompt, params, **template)])

    @refuse_unknown_keywords("embed")
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = MEAN_POOLING,
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Embed prompts as unit vectors, the same as the server's /v1/embeddings.

        Args:
            prompts: As for ``generate``.
            pooling: Of the final hidden states: "mean" or "last".
            dimensions: Keep only the first ones, normalized again.
            progress: As for ``generate``.

        Returns:
            [N, H] float32, each row of length 1.

        Raises:
            RequestError: A prompt or an argument is invalid.
        """
        requests = [self.embedding_request(prompt, pooling) for prompt in as_prompt_list(prompts)]
        return stack_normalized_embeddings(self._run_requests(requests, progress), dimensions)

    def embedding_request(self, prompt: Prompt, pooling: str = MEAN_POOLING) -> RequestOutputState:
        """Make a request for a prompt's embedding, without queueing it. Raises RequestError."""
        request = self.request(prompt, SamplingParams(max_tokens=0)).request
        return RequestOutputState(replace(request, pooling=pooling), None, None)

    def request(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> RequestOutputState:
        """Make a request of a prompt in any form or a conversation, without queueing it.

        Raises RequestError.
        """
        self.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        check_no_sampling_keywords(template)
        return self.language.request(prompt, check_sampling_params_type(params), **template)

    def chat_request(
        self, messages: Messages, params: SamplingParams | None, **template: Any
    ) -> RequestOutputState:
        """Make a request of one conversation, without queueing it.

        Raises UsageError if the engine has no chat template.
        """
        self.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        check_no_sampling_keywords(template)
        return self.language.chat_request(messages, check_sampling_params_type(params), **template)

    def stream_request(self, request: RequestOutputState) -> Iterator[OutputDelta]:
        """Yield the deltas of a request that ``request`` or ``chat_request`` made.

        Closing the iterator aborts it.
        """
        self.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        return self._step_until_done([request])

    # -- stepping
    # ---------------------------------------------------------------------------

    def _run_requests(
        self, states: Sequence[RequestOutputState], progress: bool | None
    ) -> list[RequestOutput]:
        done = 0
        with show_progress(
            "prompts", enabled=progress, delay=0.0 if progress else PROGRESS_DELAY_SECONDS
        ) as report:
            for delta in self._step_until_done(states):
                if delta.output.finished:
                    done += 1
                    report("prompts", done, len(states))
        return [state.output for state in states]

    def _step_until_done(self, states: Sequence[RequestOutputState]) -> Iterator[OutputDelta]:
        """Queue the requests and step until all have ended; closing the iterator aborts the rest.

        Several of these iterators may be active at once (a stream is read while another one
        starts). Each step serves the requests of all of them; the deltas of other iterators are
        queued for these.
        """
        deltas: deque[OutputDelta] = deque()
        own = {state.request.id: state for state in states}
        try:
            for id, state in own.items():
                self._running[id], self._delta_queues[id] = state, deltas
            make_guide = partial(self.language.make_guide, vocab=self.engine_core.vocab)
            self.engine_core.add_all((state.request for state in own.values()), make_guide)
            while deltas or any(id in self._running for id in own):
                while deltas:
                    yield deltas.popleft()
                if any(id in self._running for id in own):
                    assert self.engine_core.has_work, "the engine core lost a request"
                    for delta in self.step(self._running):
                        self._delta_queues[delta.output.id].append(delta)
        finally:
            for id in own:
                self._delta_queues.pop(id, None)
                if self._running.pop(id, None) is not None and self._opened is not None:
                    self._opened.abort(id)

    def step(self, running: dict[str, RequestOutputState]) -> list[OutputDelta]:
        """Run one engine step and return its deltas.

        Args:
            running: Request states by request id; finished ones are removed from it.
        """
        deltas = []
        for token in self.engine_core.step():
            state = running.get(token.request_id)
            if state is None:
                continue
            delta, stopped = state.process_token_output(token)
            if stopped:
                self.engine_core.finish_on_stop_string(token.request_id, token.index)
            if state.output.finished:
                del running[token.request_id]
            deltas.append(delta)
        return deltas


def build_engine(
    checkpoint: str | Path,
    out: str | Path,
    config: BuildConfig | None = None,
    *,
    delta: Path | None = None,
    vision: Sequence[Path] = (),
    on_progress: Progress | None = None,
    check: bool = True,
    tune: bool = True,
    plan: BuildPlan | None = None,
) -> dict[str, Any]:
    """Build an engine, check it against the acceptance contract, and write it.

    Args:
        checkpoint: What to build from.
        out: The engine folder.
        config: Build options.
        delta: As ``open_checkpoint`` takes it.
        vision: As ``open_checkpoint`` takes it.
        on_progress: Called with (stage, done, total).
        check: Whether to run the acceptance contract.
        tune: Autotune launch configs on the target GPU, if there is one, and store the best ones
            in the engine.
        plan: A plan already made from this checkpoint and config.

    Returns:
        The acceptance report.

    Raises:
        AcceptanceError: The engine did not pass.
    """
    from modelmill.accept.run import run_engine_acceptance
    from modelmill.builder.autotune_measure import autotune
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_build_plan
    from modelmill.checkpoint.open import open_checkpoint

    if plan is None:
        plan = make_build_plan(
            open_checkpoint(Path(checkpoint), delta=delta, vision=vision), config or BuildConfig()
        )

    def check_staged(staged: Path, staged_plan: Any) -> dict[str, Any]:
        return run_engine_acceptance(staged, staged_plan.checkpoint, on_progress=on_progress)

    run_autotune = (lambda plan: autotune(plan, on_progress)) if tune else None
    return build(plan, Path(out), check_staged if check else None, on_progress, run_autotune)


def resolve_or_build_engine(
    model: Path,
    build: Mapping[str, Any],
    progress: Progress,
    engine_type: str | None = "language",
) -> Path:
    """Return ``model`` if it is an engine, else what ``ensure_cached_engine`` returns.

    Raises:
        UsageError: There are build options for a built engine.
    """
    if not is_engine_folder(model):
        return ensure_cached_engine(model, BuildConfig(**build), progress, engine_type)
    if build:
        raise UsageError(
            f"{', '.join(build)}: decided when an engine is built, and {model} is already "
            "built; leave it out, or give the checkpoint"
        )
    return model


def ensure_cached_engine(
    checkpoint: Path,
    config: BuildConfig,
    on_progress: Progress | None = None,
    engine_type: str | None = "language",
) -> Path:
    """Return the checkpoint's engine in the cache folder; build it first if it is missing.

    Args:
        checkpoint: What to build from.
        config: Build options.
        on_progress: Called with (stage, done, total).
        engine_type: The required engine type; None: any.

    Raises:
        UsageError: The checkpoint's model has another type, or the recipe does not use an option.
    """
    from modelmill.builder.plan import make_build_plan
    from modelmill.builder.recipe_option_check import check_recipe_options
    from modelmill.checkpoint.open import open_checkpoint

    # a plan asks the backends which ops they have, which would compile the kernels in silence
    ensure_cpu_kernels_compiled(
        "cpu" if config.target == "cpu" else "auto", on_progress or (lambda *_: None)
    )
    plan = make_build_plan(open_checkpoint(checkpoint), config)
    check_recipe_options(config, segmentation=plan.engine_type != "language")
    if engine_type is not None:
        check_engine_type(checkpoint, plan.engine_type, engine_type)
    engine = cache_dir() / "engines" / f"{checkpoint.stem}-{plan.resume_key()[:16]}.engine"
    if not is_engine_folder(engine):
        sys.stderr.write(f"modelmill: building an engine for {checkpoint} into {engine}\n")
        sys.stderr.writelines(f"modelmill: warning: {warning}\n" for warning in plan.warnings)
        build_engine(checkpoint, engine, config, on_progress=on_progress, tune=False, plan=plan)
    return engine


LLM.__doc__ = f"""{LLM.__doc__}
    Options that apply when an engine is opened:

{describe_options(RunConfig)}

    Build options, if ``model`` is a checkpoint:

{describe_options(BuildConfig, exclude=RUN_CONFIG_FIELDS)}
    """

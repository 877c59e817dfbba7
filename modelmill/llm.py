"""Text in, text out: the class a user imports."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from modelmill.artifact.manifest import check_engine_type
from modelmill.artifact.store import is_engine
from modelmill.core import log
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.env import cache_dir
from modelmill.core.errors import UsageError
from modelmill.core.options import (
    BUILD_FIELDS,
    RUN_FIELDS,
    EngineOptions,
    accept_options,
    check_option_names,
    describe_options,
)
from modelmill.core.types import POOL_MEAN, SamplingParams
from modelmill.outputs import OutputDelta, RequestOutput
from modelmill.progress import show_progress
from modelmill.prompt_inputs import (
    as_prompt_list,
    check_params,
    params_per_prompt,
    stack_embeddings,
)
from modelmill.request_state import RequestState
from modelmill.runtime.device import compile_cpu_kernels
from modelmill.runtime.engine_core import EngineCore
from modelmill.text_processor import Messages, Prompt, TextProcessor

if TYPE_CHECKING:
    from modelmill.builder.plan import BuildPlan

_log = log.get_logger(__name__)
ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
PROGRESS_DELAY_SECONDS = 1.0
"""Seconds before answers that are made show a bar."""


class LLM:
    """An engine, opened: ``generate``, ``chat``, ``stream`` and ``embed``.

    ``with LLM(path) as llm:`` closes it at the end; a closed one refuses every call with a
    UsageError. Not thread-safe.

    Args:
        model: An engine folder; or a checkpoint, which is built into the cache first (and said on
    stderr). tensor_parallel_size: Another name for ``tp``.
        chat_template: In place of the engine's own: a shipped one's name (vicuna, chatml), a file,
    or its text. progress: Called with (stage, done, total) while it is built, compiled for and
    opened. None: shown on a
            terminal and in a notebook; False: nowhere.
        openai_defaults: Where the checkpoint says nothing of sampling, a request that says nothing
    either is drawn as OpenAI's API would; by default as ``core.generation_defaults`` says.
        options: Fields of RunConfig and BuildConfig, by name. They are listed below.

    Raises:
        UnknownOption: An option that there is not; a TypeError.
        UsageError: An option that makes no sense here, such as a build's for an engine.
        ModelmillError: What the checkpoint, the engine and the device may have against it.
    """

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
        if tensor_parallel_size is not None:
            options = {"tp": tensor_parallel_size, **options}
        engine = Path(model)
        self.path = engine
        self._engine_core: EngineCore | None = None
        if callable(progress):
            self._open(engine, chat_template, options, progress, openai_defaults)
        else:
            with show_progress(f"opening {engine.name}", enabled=progress) as report:
                self._open(engine, chat_template, options, report, openai_defaults)

    def _open(
        self,
        engine: Path,
        chat_template: str | Path | None,
        options: EngineOptions,
        progress: ProgressCallback,
        openai_defaults: bool,
    ) -> None:
        build = {name: value for name, value in options.items() if name in BUILD_FIELDS}
        run = {name: value for name, value in options.items() if name in RUN_FIELDS}
        config = RunConfig(**run)  # type: ignore[arg-type]
        compile_cpu_kernels(config.device, progress)
        if not is_engine(engine):
            engine = cached_engine(engine, BuildConfig(**build), progress)  # type: ignore[arg-type]
        elif build:
            raise UsageError(
                f"{', '.join(build)}: decided when an engine is built, and {engine} is one "
                "already; "
                "leave it out, or give the checkpoint"
            )
        self.path = engine
        self._engine_core = loop = EngineCore.open(engine, config)
        artifact = loop.artifact
        assert artifact is not None, "a loop that was opened from a folder keeps its artifact"
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
        if (unused := language.generation_defaults.warning()) is not None:
            _log.warning("%s", unused)
        vocab = loop.vocab  # not the loop, which would hold itself
        loop.input_processor.guide_factory = lambda request: language.make_guide(request, vocab)
        self._running: dict[str, RequestState] = {}
        self._news: dict[str, deque[OutputDelta]] = {}

    @property
    def engine_core(self) -> EngineCore:
        """The engine's loop. Raises UsageError once it is closed."""
        if self._engine_core is None:
            raise UsageError(
                f"this {type(self).__name__} ({self.path}) is closed; open the engine again"
            )
        return self._engine_core

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine_core is None

    def close(self) -> None:
        """Give weights and KV cache free and end the other ranks, where there are any. Closing
        twice is closing once.

        Streams that are open end with the UsageError that every later call gets.
        """
        loop, self._engine_core = self._engine_core, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> Self:
        self.engine_core  # noqa: B018 -- a closed one cannot be entered
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine_core is None:
            return f"{type(self).__name__}({str(self.path)!r}, closed)"
        loop, manifest = self._engine_core, self.language.manifest
        sizes = [
            entry["bytes"] for name, entry in manifest.files.items() if name.startswith("weights/")
        ]
        facts = {
            "model_type": manifest.model_type,
            "dtype": str(loop.dtype).removeprefix("torch."),
            "quantization": manifest.build.get("quantization", "none"),
            "device": str(loop.device),
            **({"tp": loop.config.tp} if loop.config.tp > 1 else {}),
            "weights": format_bytes(sum(sizes)),
            "max_model_len": loop.max_model_len,
        }
        told = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        return f"{type(self).__name__}({str(self.path)!r}, {told})"

    # -- asking
    # ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer raw prompts: texts, {"prompt": text}, {"prompt_token_ids": ids} or lists of ids,
        all in one batch.

        An object may add a "cache_salt": requests of different salts share no cached prefix.
        Returns one RequestOutput a prompt, in order. An answer ends at ``max_tokens`` or where
        prompt and answer fill what the engine reads (``max_model_len``), whichever comes first:
        ``finish_reason`` is "length" then.

        progress: a bar; default: on a terminal (stderr) and in a notebook, where it takes longer
        than a second.
        """
        asked = as_prompt_list(prompts)
        requests = [
            self.request(prompt, given)
            for prompt, given in zip(asked, params_per_prompt(params, len(asked)), strict=True)
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
        """Answer conversations ([{"role", "content"}, …], one or many) through the engine's chat
        template.
        """
        talks = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        requests = [
            self.chat_request(talk, given, **template)  # type: ignore[arg-type]
            for talk, given in zip(talks, params_per_prompt(params, len(talks)), strict=True)
        ]
        return self._run_requests(requests, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[OutputDelta]:
        """Deltas of one answer as they come. Closing the iterator aborts the request."""
        return self._step_until_done([self.request(prompt, params, **template)])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = POOL_MEAN,
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Vectors [N, H] float32 of texts, of length 1, as the server's /v1/embeddings gives them.

        prompts: as ``generate`` takes them. pooling: of the final hidden states, "mean" or "last".
        dimensions: only the first so many, brought to length 1 again. Raises RequestError.
        """
        requests = [self.embedding_request(prompt, pooling) for prompt in as_prompt_list(prompts)]
        return stack_embeddings(self._run_requests(requests, progress), dimensions)

    def embedding_request(self, prompt: Prompt, pooling: str = POOL_MEAN) -> RequestState:
        """A prompt whose embedding is wanted, as a request that has not been added yet.

        Raises RequestError.
        """
        asked = self.request(prompt, SamplingParams(max_tokens=0)).request
        return RequestState(replace(asked, pooling=pooling), None, None)

    def request(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> RequestState:
        """A prompt in any form, or a conversation, as a request that has not been added yet.

        Raises RequestError.
        """
        self.engine_core  # noqa: B018 -- a closed one makes none
        return self.language.request(prompt, check_params(params), **template)

    def chat_request(
        self, messages: Messages, params: SamplingParams | None, **template: Any
    ) -> RequestState:
        """One conversation as a request.

        Raises UsageError where the engine has no chat template.
        """
        self.engine_core  # noqa: B018 -- a closed one makes none
        return self.language.chat_request(messages, check_params(params), **template)

    # -- inside
    # ---------------------------------------------------------------------------

    def _run_requests(
        self, states: Sequence[RequestState], progress: bool | None
    ) -> list[RequestOutput]:
        done = 0
        with show_progress(
            "prompts", enabled=progress, delay=0.0 if progress else PROGRESS_DELAY_SECONDS
        ) as report:
            for delta in self._step_until_done(states):
                if delta.output.finished:
                    done += 1
                    report("prompts", done, len(states))
        return [d.output for d in states]

    def _step_until_done(self, states: Sequence[RequestState]) -> Iterator[OutputDelta]:
        """Add the requests and step the loop until all have ended; aborts what is left when it is
        closed.

        Several may be open at once (a stream that is read while another is begun): each step serves
        all of them, and what it says of others waits for them.
        """
        news: deque[OutputDelta] = deque()
        own = {d.request.id: d for d in states}
        try:
            for id, dialogue in own.items():
                self._running[id], self._news[id] = dialogue, news
            self.engine_core.add_all(dialogue.request for dialogue in own.values())
            while news or any(id in self._running for id in own):
                while news:
                    yield news.popleft()
                if any(id in self._running for id in own):
                    assert self.engine_core.has_work, "the loop forgot a request"
                    for delta in self.step(self._running):
                        self._news[delta.output.id].append(delta)
        finally:
            for id in own:
                self._news.pop(id, None)
                if self._running.pop(id, None) is not None and self._engine_core is not None:
                    self._engine_core.abort(id)

    def step(self, running: dict[str, RequestState]) -> list[OutputDelta]:
        """One step of the loop: what it adds to the ``running`` dialogues; ended ones are taken out
        of the dict.
        """
        deltas = []
        for token in self.engine_core.step():
            dialogue = running.get(token.request_id)
            if dialogue is None:
                continue
            delta, stopped = dialogue.process(token)
            if stopped:
                self.engine_core.finish(token.request_id, token.index)
            if dialogue.output.finished:
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
    on_progress: Callable[[str, int, int], None] | None = None,
    check: bool = True,
    tune: bool = True,
    plan: BuildPlan | None = None,
) -> dict[str, Any]:
    """Build, judge and write an engine; returns the acceptance report. Raises AcceptanceError where
    it is refused.

    delta, vision: as open_checkpoint takes them. tune: time launch sizes on the GPU that it is
    built for, where there is one, and keep the best in the engine. plan: what was decided already,
    of this checkpoint and config.
    """
    from modelmill.accept.run import accept
    from modelmill.builder.autotune_measure import autotune as rehearse
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_plan
    from modelmill.checkpoint.open import open_checkpoint

    if plan is None:
        plan = make_plan(
            open_checkpoint(Path(checkpoint), delta=delta, vision=vision), config or BuildConfig()
        )

    def judge(staged: Path, judged: Any) -> dict[str, Any]:
        return accept(staged, judged.checkpoint, on_progress=on_progress)

    tuned = (lambda plan: rehearse(plan, on_progress)) if tune else None
    return build(plan, Path(out), judge if check else None, on_progress, tuned)


def cached_engine(
    checkpoint: Path,
    config: BuildConfig,
    on_progress: Callable[[str, int, int], None] | None = None,
    engine_type: str | None = "language",
) -> Path:
    """The engine of a checkpoint in the cache folder, built now where it is not there yet.

    engine_type: what it must do; None: anything. Raises UsageError where the checkpoint's model
    does something else, and for options that the recipe does not read.
    """
    from modelmill.builder.plan import make_plan
    from modelmill.builder.recipe_options import check_recipe_options
    from modelmill.checkpoint.open import open_checkpoint

    plan = make_plan(open_checkpoint(checkpoint), config)
    check_recipe_options(config, segmentation=plan.engine_type != "language")
    if engine_type is not None:
        check_engine_type(checkpoint, plan.engine_type, engine_type)
    engine = cache_dir() / "engines" / f"{checkpoint.stem}-{plan.resume_key()[:16]}.engine"
    if not is_engine(engine):
        compile_cpu_kernels(
            "cpu" if config.target == "cpu" else "auto", on_progress or (lambda *_: None)
        )
        sys.stderr.write(f"modelmill: building an engine for {checkpoint} into {engine}\n")
        sys.stderr.writelines(f"modelmill: warning: {each}\n" for each in plan.warnings)
        build_engine(checkpoint, engine, config, on_progress=on_progress, tune=False, plan=plan)
    return engine


LLM.__doc__ = f"""{LLM.__doc__}
    Options of a start:

{describe_options(RunConfig)}

    Options of a build, where a checkpoint is given:

{describe_options(BuildConfig, exclude=RUN_FIELDS)}
    """

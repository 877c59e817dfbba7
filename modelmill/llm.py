"""Text in, text out: the class a user imports."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from modelmill.answer import Answer, Delta
from modelmill.artifact.manifest import check_kind
from modelmill.artifact.store import is_engine
from modelmill.core import log
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.env import cache_dir
from modelmill.core.errors import UsageError
from modelmill.core.options import (
    BUILD,
    RUN,
    EngineOptions,
    accept_options,
    check_known,
    describe_options,
)
from modelmill.core.size import byte_text
from modelmill.core.types import MEAN, SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.inputs import each_params, listed, one_params, stack_embeddings
from modelmill.language import Language, Messages, Prompt
from modelmill.progress import shown
from modelmill.runtime.device import prepare
from modelmill.runtime.loop import Loop

if TYPE_CHECKING:
    from modelmill.build.plan import Plan

_log = log.get(__name__)
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
DELAY = 1.0
"""Seconds before answers that are made show a bar."""


class LLM:
    """An engine, opened: ``generate``, ``chat``, ``stream`` and ``embed``.

    ``with LLM(path) as llm:`` closes it at the end; a closed one refuses every call with a UsageError. Not thread-safe.

    Args:
        model: An engine folder; or a checkpoint, which is built into the cache first (and said on stderr).
        tensor_parallel_size: Another name for ``tp``.
        chat_template: In place of the engine's own: a shipped one's name (vicuna, chatml), a file, or its text.
        progress: Called with (stage, done, total) while it is built, compiled for and opened. None: shown on a
            terminal and in a notebook; False: nowhere.
        openai_defaults: Where the checkpoint says nothing of sampling, a request that says nothing either is drawn as
            OpenAI's API would; by default as ``core.generation`` says.
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
        progress: Progress | bool | None = None,
        openai_defaults: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_known(options, (*RUN, *BUILD), type(self).__name__)
        if tensor_parallel_size is not None:
            options = {"tp": tensor_parallel_size, **options}
        engine = Path(model)
        self.path = engine
        self._loop: Loop | None = None
        if callable(progress):
            self._open(engine, chat_template, options, progress, openai_defaults)
        else:
            with shown(f"opening {engine.name}", wanted=progress) as report:
                self._open(engine, chat_template, options, report, openai_defaults)

    def _open(
        self,
        engine: Path,
        chat_template: str | Path | None,
        options: EngineOptions,
        progress: Progress,
        openai_defaults: bool,
    ) -> None:
        build = {name: value for name, value in options.items() if name in BUILD}
        run = {name: value for name, value in options.items() if name in RUN}
        config = RunConfig(**run)  # type: ignore[arg-type]
        prepare(config.device, progress)
        if not is_engine(engine):
            engine = cached_engine(engine, BuildConfig(**build), progress)  # type: ignore[arg-type]
        elif build:
            raise UsageError(
                f"{', '.join(build)}: decided when an engine is built, and {engine} is one already; "
                "leave it out, or give the checkpoint"
            )
        self.path = engine
        self._loop = loop = Loop.open(engine, config)
        artifact = loop.artifact
        assert artifact is not None, "a loop that was opened from a folder keeps its artifact"
        self.language = language = Language(
            engine, artifact.manifest, artifact.tokenizer_files(), chat_template, local=True, openai=openai_defaults
        )
        self.tokenizer, self.chat_format = language.tokenizer, language.chat_format
        self.defaults, self.eos_ids = language.defaults, language.eos_ids
        if (unused := language.generation.warning()) is not None:
            _log.warning("%s", unused)
        vocab = loop.vocab  # not the loop, which would hold itself
        loop.entry.guides = lambda request: language.guide(request, vocab)
        self._running: dict[str, Dialogue] = {}
        self._news: dict[str, deque[Delta]] = {}

    @property
    def loop(self) -> Loop:
        """The engine's loop. Raises UsageError once it is closed."""
        if self._loop is None:
            raise UsageError(f"this {type(self).__name__} ({self.path}) is closed; open the engine again")
        return self._loop

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._loop is None

    def close(self) -> None:
        """Give weights and KV cache free and end the other ranks, where there are any. Closing twice is closing once.

        Streams that are open end with the UsageError that every later call gets.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> Self:
        self.loop  # noqa: B018 -- a closed one cannot be entered
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._loop is None:
            return f"{type(self).__name__}({str(self.path)!r}, closed)"
        loop, manifest = self._loop, self.language.manifest
        sizes = [entry["bytes"] for name, entry in manifest.files.items() if name.startswith("weights/")]
        facts = {
            "model_type": manifest.model_type,
            "dtype": str(loop.dtype).removeprefix("torch."),
            "quantization": manifest.build.get("quantization", "none"),
            "device": str(loop.device),
            **({"tp": loop.config.tp} if loop.config.tp > 1 else {}),
            "weights": byte_text(sum(sizes)),
            "max_model_len": loop.max_model_len,
        }
        told = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        return f"{type(self).__name__}({str(self.path)!r}, {told})"

    # -- asking -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Answer]:
        """Answer raw prompts: texts, {"prompt": text}, {"prompt_token_ids": ids} or lists of ids, all in one batch.

        An object may add a "cache_salt": requests of different salts share no cached prefix.
        Returns one Answer a prompt, in order. An answer ends at ``max_tokens`` or where prompt and answer fill what the
        engine reads (``max_model_len``), whichever comes first: ``finish_reason`` is "length" then.

        progress: a bar; default: on a terminal (stderr) and in a notebook, where it takes longer than a second.
        """
        asked = listed(prompts)
        requests = [
            self.request(prompt, given) for prompt, given in zip(asked, each_params(params, len(asked)), strict=True)
        ]
        return self._answer(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template: Any,
    ) -> list[Answer]:
        """Answer conversations ([{"role", "content"}, …], one or many) through the engine's chat template."""
        talks = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        requests = [
            self.chat_request(talk, given, **template)  # type: ignore[arg-type]
            for talk, given in zip(talks, each_params(params, len(talks)), strict=True)
        ]
        return self._answer(requests, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """Deltas of one answer as they come. Closing the iterator aborts the request."""
        return self._pump([self.request(prompt, params, **template)])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = MEAN,
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Vectors [N, H] float32 of texts, of length 1, as the server's /v1/embeddings gives them.

        prompts: as ``generate`` takes them. pooling: of the final hidden states, "mean" or "last". dimensions: only the
        first so many, brought to length 1 again. Raises RequestError.
        """
        requests = [self.embedding_request(prompt, pooling) for prompt in listed(prompts)]
        return stack_embeddings(self._answer(requests, progress), dimensions)

    def embedding_request(self, prompt: Prompt, pooling: str = MEAN) -> Dialogue:
        """A prompt whose embedding is wanted, as a request that has not been added yet. Raises RequestError."""
        asked = self.request(prompt, SamplingParams(max_tokens=0)).request
        return Dialogue(replace(asked, pooling=pooling), None, None)

    def request(self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any) -> Dialogue:
        """A prompt in any form, or a conversation, as a request that has not been added yet. Raises RequestError."""
        self.loop  # noqa: B018 -- a closed one makes none
        return self.language.request(prompt, one_params(params), **template)

    def chat_request(self, messages: Messages, params: SamplingParams | None, **template: Any) -> Dialogue:
        """One conversation as a request. Raises UsageError where the engine has no chat template."""
        self.loop  # noqa: B018 -- a closed one makes none
        return self.language.chat_request(messages, one_params(params), **template)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _answer(self, dialogues: Sequence[Dialogue], progress: bool | None) -> list[Answer]:
        done = 0
        with shown("prompts", wanted=progress, delay=0.0 if progress else DELAY) as report:
            for delta in self._pump(dialogues):
                if delta.answer.finished:
                    done += 1
                    report("prompts", done, len(dialogues))
        return [d.answer for d in dialogues]

    def _pump(self, dialogues: Sequence[Dialogue]) -> Iterator[Delta]:
        """Add the requests and step the loop until all have ended; aborts what is left when it is closed.

        Several may be open at once (a stream that is read while another is begun): each step serves all of them, and
        what it says of others waits for them.
        """
        news: deque[Delta] = deque()
        own = {d.request.id: d for d in dialogues}
        try:
            for id, dialogue in own.items():
                self._running[id], self._news[id] = dialogue, news
            self.loop.add_all(dialogue.request for dialogue in own.values())
            while news or any(id in self._running for id in own):
                while news:
                    yield news.popleft()
                if any(id in self._running for id in own):
                    assert self.loop.has_work, "the loop forgot a request"
                    for delta in self.advance(self._running):
                        self._news[delta.answer.id].append(delta)
        finally:
            for id in own:
                self._news.pop(id, None)
                if self._running.pop(id, None) is not None and self._loop is not None:
                    self._loop.abort(id)

    def advance(self, running: dict[str, Dialogue]) -> list[Delta]:
        """One step of the loop: what it adds to the ``running`` dialogues; ended ones are taken out of the dict."""
        deltas = []
        for token in self.loop.step():
            dialogue = running.get(token.request)
            if dialogue is None:
                continue
            delta, stopped = dialogue.push(token)
            if stopped:
                self.loop.finish(token.request, token.index)
            if dialogue.answer.finished:
                del running[token.request]
            deltas.append(delta)
        return deltas


def build_engine(
    checkpoint: str | Path,
    out: str | Path,
    config: BuildConfig | None = None,
    *,
    delta: Path | None = None,
    vision: Sequence[Path] = (),
    progress: Callable[[str, int, int], None] | None = None,
    check: bool = True,
    tune: bool = True,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Build, judge and write an engine; returns the acceptance report. Raises AcceptanceError where it is refused.

    delta, vision: as open_checkpoint takes them. tune: time launch sizes on the GPU that it is built for, where there
    is one, and keep the best in the engine. plan: what was decided already, of this checkpoint and config.
    """
    from modelmill.accept.run import accept
    from modelmill.build.builder import build
    from modelmill.build.plan import make_plan
    from modelmill.build.rehearsal import tune as rehearse
    from modelmill.checkpoint.open import open_checkpoint

    if plan is None:
        plan = make_plan(open_checkpoint(Path(checkpoint), delta=delta, vision=vision), config or BuildConfig())

    def judge(staged: Path, judged: Any) -> dict[str, Any]:
        return accept(staged, judged.checkpoint, progress=progress)

    tuned = (lambda plan: rehearse(plan, progress)) if tune else None
    return build(plan, Path(out), judge if check else None, progress, tuned)


def cached_engine(
    checkpoint: Path,
    config: BuildConfig,
    progress: Callable[[str, int, int], None] | None = None,
    kind: str | None = "language",
) -> Path:
    """The engine of a checkpoint in the cache folder, built now where it is not there yet.

    kind: what it must do; None: anything. Raises UsageError where the checkpoint's model does something else, and for
    options that the recipe does not read.
    """
    from modelmill.build.options import check_concerns
    from modelmill.build.plan import make_plan
    from modelmill.checkpoint.open import open_checkpoint

    plan = make_plan(open_checkpoint(checkpoint), config)
    check_concerns(config, still=plan.kind != "language")
    if kind is not None:
        check_kind(checkpoint, plan.kind, kind)
    engine = cache_dir() / "engines" / f"{checkpoint.stem}-{plan.key()[:16]}.engine"
    if not is_engine(engine):
        prepare("cpu" if config.target == "cpu" else "auto", progress or (lambda *_: None))
        sys.stderr.write(f"modelmill: building an engine for {checkpoint} into {engine}\n")
        sys.stderr.writelines(f"modelmill: warning: {each}\n" for each in plan.warnings)
        build_engine(checkpoint, engine, config, progress=progress, tune=False, plan=plan)
    return engine


LLM.__doc__ = f"""{LLM.__doc__}
    Options of a start:

{describe_options(RunConfig)}

    Options of a build, where a checkpoint is given:

{describe_options(BuildConfig, leave=RUN)}
    """

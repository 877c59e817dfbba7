"""Text in, text out: the class a user imports."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.answer import Answer, Delta
from modelmill.artifact.manifest import check_kind
from modelmill.artifact.store import is_engine
from modelmill.core import log
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.env import cache_dir
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.types import SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.language import Language, Messages, Prompt
from modelmill.runtime.loop import Loop

if TYPE_CHECKING:
    from modelmill.build.plan import Plan

_log = log.get(__name__)


class LLM:
    """An engine, opened: ``generate``, ``chat`` and ``stream``.

    model: an engine folder, or a checkpoint, which is built into the cache first (and said on stderr). dtype,
    quantization and the other fields of BuildConfig apply to that build; the fields of RunConfig to this start.
    tensor_parallel_size: RunConfig's tp. openai_defaults: where the checkpoint says nothing of sampling, a request that
    says nothing either is drawn as OpenAI's API would; by default as ``core.generation`` says.

    Raises the errors of the artifact, checkpoint and runtime rooms; UsageError for an unknown option.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        chat_template: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        openai_defaults: bool = False,
        **options: Any,
    ) -> None:
        build, run = _split({"tp": tensor_parallel_size, **options})
        engine = Path(model)
        if not is_engine(engine):
            engine = cached_engine(engine, BuildConfig(**build), progress)
        elif build:
            raise UsageError(
                f"{', '.join(build)}: decided when an engine is built, and {engine} is one already; "
                "leave it out, or give the checkpoint"
            )
        self.path = engine
        self.loop = Loop.open(engine, RunConfig(**run))
        artifact = self.loop.artifact
        assert artifact is not None, "a loop that was opened from a folder keeps its artifact"
        self.language = language = Language(
            engine, artifact.manifest, artifact.tokenizer_files(), chat_template, local=True, openai=openai_defaults
        )
        self.tokenizer, self.chat_format = language.tokenizer, language.chat_format
        self.defaults, self.eos_ids = language.defaults, language.eos_ids
        if (unused := language.generation.warning()) is not None:
            _log.warning("%s", unused)
        self.loop.entry.guides = lambda request: language.guide(request, self.loop.vocab)
        self._running: dict[str, Dialogue] = {}
        self._news: dict[str, deque[Delta]] = {}

    def close(self) -> None:
        """End the other ranks, where there are any; the engine answers no more then."""
        self.loop.close()

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
        Returns one Answer a prompt, in order. progress: a bar on stderr; default: on a terminal, for more than one.
        """
        listed = _listed(prompts)
        requests = [
            self.request(prompt, given) for prompt, given in zip(listed, _each(params, len(listed)), strict=True)
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
            for talk, given in zip(talks, _each(params, len(talks)), strict=True)
        ]
        return self._answer(requests, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """Deltas of one answer as they come. Closing the iterator aborts the request."""
        return self._pump([self.request(prompt, params, **template)])

    def request(self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any) -> Dialogue:
        """A prompt in any form, or a conversation, as a request that has not been added yet. Raises RequestError."""
        return self.language.request(prompt, _one(params), **template)

    def chat_request(self, messages: Messages, params: SamplingParams | None, **template: Any) -> Dialogue:
        """One conversation as a request. Raises UsageError where the engine has no chat template."""
        return self.language.chat_request(messages, _one(params), **template)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _answer(self, dialogues: Sequence[Dialogue], progress: bool | None) -> list[Answer]:
        with _bar(progress, len(dialogues)) as advance:
            for delta in self._pump(dialogues):
                if delta.answer.finished:
                    advance()
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
                if self._running.pop(id, None) is not None:
                    self.loop.abort(id)

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
        sys.stderr.write(f"modelmill: building an engine for {checkpoint} into {engine}\n")
        sys.stderr.writelines(f"modelmill: warning: {each}\n" for each in plan.warnings)
        build_engine(checkpoint, engine, config, progress=progress, tune=False, plan=plan)
    return engine


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for a build and for this start. max_model_len and kernels concern the start of an engine."""
    run_names = {f.name for f in fields(RunConfig)}
    build_names = {f.name for f in fields(BuildConfig)} - run_names
    unknown = sorted(set(options) - run_names - build_names)
    if unknown:
        raise UsageError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(run_names | build_names))}")
    build = {k: v for k, v in options.items() if k in build_names}
    return build, {k: v for k, v in options.items() if k in run_names}


def _listed(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    whole = bool(prompts) and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts)
    return [prompts] if whole else prompts


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams | None) for one in params):
        raise RequestError("sampling takes SamplingParams, one for all prompts or a list with one a prompt")
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {count} prompts; give one, or one a prompt")
    return list(params)


def _one(params: SamplingParams | None) -> SamplingParams | None:
    """Of one prompt. Raises RequestError for what is none."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"sampling takes SamplingParams, not {type(params).__name__}")
    return params


@contextlib.contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar over requests; by default on a terminal and for more than one."""
    if not (wanted if wanted is not None else total > 1 and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)

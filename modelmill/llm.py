"""Text in, text out: the class a user imports."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from modelmill.answer import Answer, Delta
from modelmill.artifact.store import is_engine
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.env import cache_dir
from modelmill.core.errors import RequestError, TokenizerError, UsageError
from modelmill.core.types import DEFAULTED, Request, SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.runtime.loop import Loop
from modelmill.text.chat import ChatFormat, load_chat
from modelmill.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class LLM:
    """An engine, opened: ``generate``, ``chat`` and ``stream``.

    model: an engine folder, or a checkpoint, which is built into the cache first (and said on stderr). dtype,
    quantization and the other fields of BuildConfig apply to that build; the fields of RunConfig to this start.
    Raises the errors of the artifact, checkpoint and runtime rooms; UsageError for an unknown option.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        chat_template: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise UsageError("tensor_parallel_size > 1 is not supported yet; use one GPU")
        build, run = _split(options)
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
        files = dict(artifact.tokenizer_files())
        if chat_template is not None:
            files["chat_template.jinja"] = _template(chat_template)
        self.tokenizer: Tokenizer | None = load_tokenizer(files) if files else None
        self.chat_format: ChatFormat | None = load_chat(files, self.tokenizer) if self.tokenizer else None
        self.defaults = sampling_defaults(artifact.manifest.generation)
        self.eos_ids = eos_ids(artifact.manifest, self.tokenizer)
        self._base_stops = _base_stops(artifact.manifest)
        self._count = itertools.count()
        self._running: dict[str, Dialogue] = {}
        self._news: dict[str, deque[Delta]] = {}

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
        """A prompt in any form, or a conversation, as a request that has not been added yet."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self.chat_request(prompt, params, **template)
        if template:
            raise UsageError(f"{', '.join(template)} belong(s) to a chat template, but this is no conversation")
        request = self._request(self._ids(prompt), params, self.eos_ids, self._base_stops, _salt(prompt))
        return Dialogue(request, text_of(prompt), self.tokenizer)

    def chat_request(self, messages: Messages, params: SamplingParams | None, **template: Any) -> Dialogue:
        """One conversation as a request. Raises UsageError where the engine has no chat template."""
        if self.chat_format is None:
            raise UsageError(f"{self.path} has no chat template; give one (chatml, vicuna, a file), or a plain prompt")
        ids = self.chat_format.encode(messages, add_generation_prompt=True, **template)
        eos = tuple(dict.fromkeys((*self.eos_ids, *self.chat_format.stop_ids)))
        request = self._request(ids, params, eos, tuple(self.chat_format.stop_strings))
        return Dialogue(request, None, self.tokenizer)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if ("prompt" in prompt) + ("prompt_token_ids" in prompt) != 1 or set(prompt) - PROMPT_KEYS:
                raise RequestError('a prompt object has "prompt" or "prompt_token_ids", and may have "cache_salt"')
            if "prompt_token_ids" in prompt:
                return _checked(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TokenizerError(
                    f"{self.path} is an ids-only engine (no tokenizer); give prompt_token_ids (run: in --file)"
                )
            return self.tokenizer.encode(prompt)
        return _checked(prompt)

    def _request(
        self,
        ids: list[int],
        params: SamplingParams | None,
        eos: tuple[int, ...],
        stops: tuple[str, ...],
        salt: str = "",
    ) -> Request:
        resolved = (params or SamplingParams()).resolved(self.defaults)
        if stops:
            resolved = replace(resolved, stop=tuple(dict.fromkeys((*resolved.stop, *stops))))
        if resolved.stop and self.tokenizer is None:
            raise TokenizerError(
                f"{self.path} is an ids-only engine (no tokenizer); use stop_token_ids instead of stop"
            )
        return Request(id=f"r{next(self._count)}", prompt=tuple(ids), params=resolved, eos_ids=eos, cache_salt=salt)

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
    progress: Callable[[str, int, int], None] | None = None,
    check: bool = True,
    tune: bool = True,
) -> dict[str, Any]:
    """Build, judge and write an engine; returns the acceptance report. Raises AcceptanceError where it is refused.

    tune: time launch sizes on the GPU that it is built for, where there is one, and keep the best in the engine.
    """
    from modelmill.accept.run import accept
    from modelmill.build.builder import build
    from modelmill.build.plan import make_plan
    from modelmill.build.rehearsal import tune as rehearse
    from modelmill.checkpoint.open import open_checkpoint

    plan = make_plan(open_checkpoint(Path(checkpoint), delta=delta), config or BuildConfig())

    def judge(staged: Path, judged: Any) -> dict[str, Any]:
        return accept(staged, judged.checkpoint, progress=progress)

    tuned = (lambda plan: rehearse(plan, progress)) if tune else None
    return build(plan, Path(out), judge if check else None, progress, tuned)


def cached_engine(
    checkpoint: Path, config: BuildConfig, progress: Callable[[str, int, int], None] | None = None
) -> Path:
    """The engine of a checkpoint in the cache folder, built now where it is not there yet."""
    from modelmill.build.plan import make_plan
    from modelmill.checkpoint.open import open_checkpoint

    plan = make_plan(open_checkpoint(checkpoint), config)
    engine = cache_dir() / "engines" / f"{checkpoint.stem}-{plan.key()[:16]}.engine"
    if not is_engine(engine):
        sys.stderr.write(f"modelmill: building an engine for {checkpoint} into {engine}\n")
        build_engine(checkpoint, engine, config, progress=progress, tune=False)
    return engine


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields from a generation_config; do_sample false means greedy, as in transformers."""
    out = {name: generation[name] for name in DEFAULTED if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        out["temperature"] = 0.0
    limit = generation.get("max_new_tokens")
    if type(limit) is int and 0 < limit < 2**31:
        out["max_tokens"] = limit
    return out


def eos_ids(manifest: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an answer: generation_config's, else the config's, else the tokenizer's."""
    for raw in (manifest.generation.get("eos_token_id"), manifest.config.get("eos_token_id")):
        found = raw if isinstance(raw, list) else [raw]
        ids = tuple(id for id in found if type(id) is int and id >= 0)
        if ids:
            return ids
    return tuple(tokenizer.eos_ids) if tokenizer is not None else ()


def text_of(prompt: Any) -> str | None:
    """The text of a prompt, where it has one."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _base_stops(manifest: Any) -> tuple[str, ...]:
    """Qwen v1's base models end a made-up dialogue at "Human:"."""
    raw = manifest.model_type == "qwen" and manifest.generation.get("chat_format") == "raw"
    return ("Human:",) if raw else ()


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


def _salt(prompt: Any) -> str:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or len(salt) > 1024):
        raise RequestError("cache_salt must be a text of up to 1024 characters")
    return salt or ""


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise RequestError("prompt_token_ids must be a list of whole numbers")
    return list(ids)


def _template(source: str | Path) -> bytes:
    """A chat template: the name of one of ours (vicuna, chatml), a file, or the template's own text."""
    shipped = resources.files("modelmill.text") / "templates" / f"{source}.jinja"
    try:
        if str(source).isidentifier() and shipped.is_file():
            return shipped.read_bytes()
        path = Path(source)
        if len(str(source)) < 1024 and path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--chat-template {source}: {error.strerror}") from None
    if "{" not in str(source):
        raise UsageError(f"--chat-template {source}: neither a file nor a template; shipped are vicuna and chatml")
    return str(source).encode()


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

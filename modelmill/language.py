"""The text side of an engine: prompts and conversations become requests in ids. It holds no tensors and needs no torch.

The class for Python and the server share it, so that a prompt means the same in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import NAME, Manifest
from modelmill.core.errors import CorruptArtifact, RequestError, TokenizerError, UsageError
from modelmill.core.generation import Generation, read_generation
from modelmill.core.types import Grammar, Insert, Request, SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.text import grammar as grammars
from modelmill.text.chat import ChatFormat, load_chat
from modelmill.text.image_chat import FILE as IMAGE_CHAT
from modelmill.text.image_chat import ImageChat, Picture, with_prompt
from modelmill.text.tokenizer import Tokenizer, load_tokenizer
from modelmill.text.tools import MARKS

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_FOLDER = "tokenizer"


class Language:
    """Tokenizer, chat format, sampling defaults and ends of answers of one engine.

    tokenizer, chat_format: None where the engine has none.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        files: Mapping[str, bytes],
        chat_template: str | Path | None = None,
        *,
        local: bool = False,
        openai: bool = False,
    ) -> None:
        """files: the tokenizer's, by name; none: an ids-only engine. chat_template: in place of the engine's own.

        local: whoever asks may name files of this machine as pictures; a server's clients may not.
        openai: where the checkpoint says nothing of sampling, OpenAI's defaults count instead of ours.

        Raises TokenizerError, TemplateError; UsageError for a chat template that cannot be read.
        """
        files = dict(files)
        if chat_template is not None:
            files = _templated(files, chat_template)
        self.path, self.manifest, self._local = path, manifest, local
        self.most_pixels: int | None = None  # of a picture in a conversation, if not vision's own limit
        self.tokenizer: Tokenizer | None = load_tokenizer(files) if files else None
        self.chat_format: ChatFormat | None = load_chat(files, self.tokenizer) if self.tokenizer else None
        self.generation = _generation(path, manifest, openai=openai)
        self.defaults = self.generation.values
        self.eos_ids = eos_ids(manifest, self.tokenizer)
        self._base_stops = _base_stops(manifest)
        self._count = itertools.count()
        self._guides: grammars.Guides | None = None

    @staticmethod
    def read(path: Path, chat_template: str | Path | None = None) -> Language:
        """The text side of an engine folder, for a server's clients. Raises ArtifactError as well."""
        try:
            manifest = Manifest.from_json((path / NAME).read_text("utf-8"), str(path))
            names = [name for name in manifest.files if name.startswith(_FOLDER + "/")]
            files = {name.removeprefix(_FOLDER + "/"): (path / name).read_bytes() for name in names}
        except (OSError, UnicodeDecodeError):
            raise CorruptArtifact(f"{path} cannot be read as an engine; rebuild it") from None
        return Language(path, manifest, files, chat_template, openai=True)

    def request(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        **template: Any,
    ) -> Dialogue:
        """A prompt in any form, or a conversation, as a request that has not been added yet.

        grammar: what the answer must be.
        """
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self.chat_request(prompt, params, grammar=grammar, **template)
        if template:
            raise UsageError(f"{', '.join(template)} belong(s) to a chat template, but this is no conversation")
        request = self._request(self.ids(prompt), params, self.eos_ids, self._base_stops, _salt(prompt))
        request = replace(request, grammar=grammar)
        follows = grammar is not None or self._is_text(request.prompt)
        return Dialogue(request, text_of(prompt), self.tokenizer, follows=follows)

    def _is_text(self, ids: Sequence[int]) -> bool:
        """Whether ids are more than control tokens (the one that every text begins with)."""
        tokenizer = self.tokenizer
        return tokenizer is not None and any(not tokenizer.is_skipped(i) and tokenizer.token_bytes(i) for i in ids)

    def chat_request(
        self,
        messages: Messages,
        params: SamplingParams | None,
        *,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        calls: bool = False,
        **template: Any,
    ) -> Dialogue:
        """One conversation as a request. Raises UsageError where the engine has no chat template.

        calls: the text shows the control tokens that mark calls of tools, for who reads them.
        """
        if self.chat_format is None:
            raise UsageError(f"{self.path} has no chat template; give one (chatml, vicuna, a file), or a plain prompt")
        inserts: tuple[Insert, ...] = ()
        if isinstance(self.chat_format, ImageChat):
            ids, pictures = self.chat_format.place(messages, add_generation_prompt=True, **template)
            inserts = tuple(self._insert(position, picture) for position, picture in pictures)
        else:
            ids = self.chat_format.encode(messages, add_generation_prompt=True, **template)
        eos = tuple(dict.fromkeys((*self.eos_ids, *self.chat_format.stop_ids)))
        request = self._request(ids, params, eos, tuple(self.chat_format.stop_strings), cache_salt)
        # MiniGPT-4's original gives its language model embeddings alone, BLIP-2's the ids with them
        counts = not isinstance(self.chat_format, ImageChat) or self.chat_format.prompt_counts
        request = replace(request, grammar=grammar, inserts=inserts, prompt_counts=counts)
        special = {} if self.tokenizer is None or not calls else self.tokenizer.special
        marks = frozenset(special[m] for m in MARKS if m in special)
        # a grammar counts every byte of the first token, the space too that an answer of its own has not
        return Dialogue(request, None, self.tokenizer, marks, follows=grammar is not None)

    @functools.cached_property
    def suggested(self) -> Generation:
        """The defaults of people, whatever those of an API's clients are."""
        return _generation(self.path, self.manifest, openai=False)

    @property
    def sees(self) -> bool:
        """Whether conversations may hold pictures."""
        return isinstance(self.chat_format, ImageChat)

    def _insert(self, position: int, picture: Picture) -> Insert:
        """A picture's place in a prompt; its handle are the pixels that the eyes take."""
        from modelmill.vision.square import from_url, square

        assert isinstance(self.chat_format, ImageChat), "no other format places pictures"
        if not picture.url and not self._local:
            raise RequestError(f"{picture.where}: a picture is an image_url with a data URL here")
        size = int(self.manifest.config["reader"]["tower"]["image"])
        source = from_url(picture.source, picture.where) if picture.url else picture.source
        pixels, digest = square(source, size, picture.where, self.most_pixels)
        return Insert(position, self.chat_format.tokens, digest, pixels)

    def ids(self, prompt: Any) -> list[int]:
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

    def guide(self, request: Request, vocab: int) -> grammars.Guide:
        """A guide for an answer to a request with a grammar. vocab: rows of the logits. Raises RequestError."""
        assert request.grammar is not None, "a guide follows a grammar"
        if self.tokenizer is None:
            raise RequestError("structured output needs a tokenizer, which this engine has not")
        if self._guides is None:
            stops = () if self.chat_format is None else self.chat_format.stop_ids
            self._guides = grammars.Guides(self.tokenizer, vocab, (*self.eos_ids, *stops))
        ends = () if request.params.ignore_eos else (*request.eos_ids, *request.params.stop_token_ids)
        return self._guides.make(request.grammar, ends)

    @functools.cached_property
    def longest_token(self) -> int:
        """Most bytes that one token stands for; at least 16, since a tokenizer may drop some of a text (spaces)."""
        tokenizer = self.tokenizer
        return (
            16 if tokenizer is None else max(16, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
        )

    def check_size(self, prompt: str | Sequence[int], longest: int) -> None:
        """Raises RequestError for a prompt that has more than ``longest`` tokens however it would be split."""
        if isinstance(prompt, str):
            if len(prompt) > longest * self.longest_token:
                raise RequestError(
                    f"the prompt has {len(prompt)} characters, this engine takes {longest} tokens; shorten it"
                )
        elif len(prompt) > longest:
            raise RequestError(f"the prompt has {len(prompt)} tokens, this engine takes {longest}; shorten it")

    def _request(
        self,
        ids: list[int],
        params: SamplingParams | None,
        eos: tuple[int, ...],
        stops: tuple[str, ...],
        salt: str = "",
    ) -> Request:
        resolved = self.generation.resolve(params or SamplingParams(), len(ids))
        if self.tokenizer is None and not (params and params.stop):
            resolved = replace(resolved, stop=())  # the checkpoint's: without text there is none to stop at
        if stops:
            resolved = replace(resolved, stop=tuple(dict.fromkeys((*resolved.stop, *stops))))
        if resolved.stop and self.tokenizer is None:
            raise TokenizerError(
                f"{self.path} is an ids-only engine (no tokenizer); use stop_token_ids instead of stop"
            )
        return Request(id=f"r{next(self._count)}", prompt=tuple(ids), params=resolved, eos_ids=eos, cache_salt=salt)


def _generation(path: Path, manifest: Any, *, openai: bool) -> Generation:
    """The defaults of an engine's requests. Raises CorruptArtifact where the manifest's make no sense."""
    try:
        return read_generation(manifest.generation, str(manifest.source.get("container", "")), openai=openai)
    except RequestError as error:
        raise CorruptArtifact(f"{path}: its generation_config: {error}; rebuild the engine") from None


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


def _salt(prompt: Any) -> str:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or len(salt) > 1024):
        raise RequestError("cache_salt must be a text of up to 1024 characters")
    return salt or ""


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise RequestError("prompt_token_ids must be a list of whole numbers")
    return list(ids)


def _templated(files: dict[str, bytes], source: str | Path) -> dict[str, bytes]:
    """The tokenizer's files with another chat template; of pictures' formats, one of the two may be named."""
    named = {"minigpt4": "first", "minigpt4-current": "current"}.get(str(source))
    if named is not None and IMAGE_CHAT in files:
        return {**files, IMAGE_CHAT: with_prompt(files, named)}
    # a template knows no pictures: the conversation becomes one of texts
    kept = {name: data for name, data in files.items() if name != IMAGE_CHAT}
    return {**kept, "chat_template.jinja": _template(source)}


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

"""The text side of an engine: prompts and conversations become requests in ids. It holds no tensors
and needs no torch.

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

from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.core.errors import CorruptArtifact, RequestError, TokenizerError, UsageError
from modelmill.core.generation_defaults import GenerationDefaults, read_generation
from modelmill.core.types import EmbeddingSpan, Grammar, Request, SamplingParams
from modelmill.request_state import RequestState
from modelmill.text import grammar as grammars
from modelmill.text.chat import ChatFormat, load_chat
from modelmill.text.image_chat import IMAGE_CHAT_FILE as IMAGE_CHAT
from modelmill.text.image_chat import ImageChat, ImagePart, with_prompt_style
from modelmill.text.tokenizer import Tokenizer, load_tokenizer
from modelmill.text.tool_prompts import CALL_MARKS

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_TOKENIZER_FOLDER = "tokenizer"


class TextProcessor:
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
        allow_local_files: bool = False,
        openai_defaults: bool = False,
    ) -> None:
        """files: the tokenizer's, by name; none: an ids-only engine. chat_template: in place of the
        engine's own.

        allow_local_files: whoever asks may name files of this machine as pictures; a server's
        clients may not. openai_defaults: where the checkpoint says nothing of sampling, OpenAI's
        defaults count instead of ours.

        Raises TokenizerError, TemplateError; UsageError for a chat template that cannot be read.
        """
        files = dict(files)
        if chat_template is not None:
            files = _with_chat_template(files, chat_template)
        self.path, self.manifest, self._allow_local_files = path, manifest, allow_local_files
        # of a picture in a conversation, if not vision's own limit
        self.max_image_pixels: int | None = None
        self.tokenizer: Tokenizer | None = load_tokenizer(files) if files else None
        self.chat_format: ChatFormat | None = (
            load_chat(files, self.tokenizer) if self.tokenizer else None
        )
        self.generation_defaults = _load_defaults(path, manifest, openai=openai_defaults)
        self.defaults = self.generation_defaults.values
        self.eos_ids = eos_ids(manifest, self.tokenizer)
        self._base_stops = _base_stops(manifest)
        self._request_counter = itertools.count()
        self._guides: grammars.GuideFactory | None = None

    @staticmethod
    def from_engine(path: Path, chat_template: str | Path | None = None) -> TextProcessor:
        """The text side of an engine folder, for a server's clients.

        Raises ArtifactError as well.
        """
        try:
            manifest = Manifest.from_json((path / MANIFEST_FILE).read_text("utf-8"), str(path))
            names = [name for name in manifest.files if name.startswith(_TOKENIZER_FOLDER + "/")]
            files = {
                name.removeprefix(_TOKENIZER_FOLDER + "/"): (path / name).read_bytes()
                for name in names
            }
        except (OSError, UnicodeDecodeError):
            raise CorruptArtifact(f"{path} cannot be read as an engine; rebuild it") from None
        return TextProcessor(path, manifest, files, chat_template, openai_defaults=True)

    def request(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        **template: Any,
    ) -> RequestState:
        """A prompt in any form, or a conversation, as a request that has not been added yet.

        grammar: what the answer must be.
        """
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self.chat_request(prompt, params, grammar=grammar, **template)
        if template:
            raise UsageError(
                f"{', '.join(template)} belong(s) to a chat template, but this is no conversation"
            )
        request = self._request(
            self.encode_prompt(prompt), params, self.eos_ids, self._base_stops, _cache_salt(prompt)
        )
        request = replace(request, grammar=grammar)
        follows = grammar is not None or self._is_text(request.prompt)
        return RequestState(request, prompt_text(prompt), self.tokenizer, continues_prompt=follows)

    def _is_text(self, ids: Sequence[int]) -> bool:
        """Whether ids are more than control tokens (the one that every text begins with)."""
        tokenizer = self.tokenizer
        return tokenizer is not None and any(
            not tokenizer.is_skipped(i) and tokenizer.token_bytes(i) for i in ids
        )

    def chat_request(
        self,
        messages: Messages,
        params: SamplingParams | None,
        *,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        calls: bool = False,
        **template: Any,
    ) -> RequestState:
        """One conversation as a request. Raises UsageError where the engine has no chat template.

        calls: the text shows the control tokens that mark calls of tools, for who reads them.
        """
        if self.chat_format is None:
            raise UsageError(
                f"{self.path} has no chat template; give one (chatml, vicuna, a file), or a plain "
                "prompt"
            )
        spans: tuple[EmbeddingSpan, ...] = ()
        if isinstance(self.chat_format, ImageChat):
            ids, pictures = self.chat_format.encode_with_images(
                messages, add_generation_prompt=True, **template
            )
            spans = tuple(self._image_span(position, picture) for position, picture in pictures)
        else:
            ids = self.chat_format.encode(messages, add_generation_prompt=True, **template)
        eos = tuple(dict.fromkeys((*self.eos_ids, *self.chat_format.stop_ids)))
        request = self._request(ids, params, eos, tuple(self.chat_format.stop_strings), cache_salt)
        # MiniGPT-4's original gives its language model embeddings alone, BLIP-2's the ids with them
        penalize_prompt = (
            not isinstance(self.chat_format, ImageChat) or self.chat_format.penalize_prompt
        )
        request = replace(
            request, grammar=grammar, embedding_spans=spans, penalize_prompt=penalize_prompt
        )
        special = {} if self.tokenizer is None or not calls else self.tokenizer.special
        marks = frozenset(special[m] for m in CALL_MARKS if m in special)
        # a grammar counts every byte of the first token, the space too that an answer of its own
        # has not
        return RequestState(
            request, None, self.tokenizer, marks, continues_prompt=grammar is not None
        )

    @functools.cached_property
    def suggested_defaults(self) -> GenerationDefaults:
        """The defaults of people, whatever those of an API's clients are."""
        return _load_defaults(self.path, self.manifest, openai=False)

    @property
    def reads_images(self) -> bool:
        """Whether conversations may hold pictures."""
        return isinstance(self.chat_format, ImageChat)

    def _image_span(self, position: int, image: ImagePart) -> EmbeddingSpan:
        """A picture's place in a prompt; its handle are the pixels that the eyes take."""
        from modelmill.vision.image_input import decode_data_url, load_square_image

        assert isinstance(self.chat_format, ImageChat), "no other format places pictures"
        if not image.is_url and not self._allow_local_files:
            raise RequestError(f"{image.location}: a picture is an image_url with a data URL here")
        size = int(self.manifest.config["image_embedder"]["vision_encoder"]["image"])
        source = decode_data_url(image.source, image.location) if image.is_url else image.source
        pixels, digest = load_square_image(source, size, image.location, self.max_image_pixels)
        return EmbeddingSpan(position, self.chat_format.image_tokens, digest, pixels)

    def encode_prompt(self, prompt: Any) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if ("prompt" in prompt) + ("prompt_token_ids" in prompt) != 1 or set(
                prompt
            ) - PROMPT_KEYS:
                raise RequestError(
                    'a prompt object has "prompt" or "prompt_token_ids", and may have "cache_salt"'
                )
            if "prompt_token_ids" in prompt:
                return _check_ids(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TokenizerError(
                    f"{self.path} is an ids-only engine (no tokenizer); give prompt_token_ids "
                    "(run: in --file)"
                )
            return self.tokenizer.encode(prompt)
        return _check_ids(prompt)

    def make_guide(self, request: Request, vocab: int) -> grammars.GrammarGuide:
        """A guide for an answer to a request with a grammar.

        vocab: rows of the logits. Raises RequestError.
        """
        assert request.grammar is not None, "a guide follows a grammar"
        if self.tokenizer is None:
            raise RequestError("structured output needs a tokenizer, which this engine has not")
        if self._guides is None:
            stops = () if self.chat_format is None else self.chat_format.stop_ids
            self._guides = grammars.GuideFactory(self.tokenizer, vocab, (*self.eos_ids, *stops))
        ends = (
            () if request.params.ignore_eos else (*request.eos_ids, *request.params.stop_token_ids)
        )
        return self._guides.make(request.grammar, ends)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Most bytes that one token stands for; at least 16, since a tokenizer may drop some of a
        text (spaces).
        """
        tokenizer = self.tokenizer
        return (
            16
            if tokenizer is None
            else max(16, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
        )

    def check_length(self, prompt: str | Sequence[int], max_tokens: int) -> None:
        """Raises RequestError for a prompt that has more than ``max_tokens`` tokens however it
        would be split.
        """
        if isinstance(prompt, str):
            if len(prompt) > max_tokens * self.max_token_bytes:
                raise RequestError(
                    f"the prompt has {len(prompt)} characters, this engine takes {max_tokens} "
                    "tokens; shorten it"
                )
        elif len(prompt) > max_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, this engine takes {max_tokens}; shorten it"
            )

    def _request(
        self,
        ids: list[int],
        params: SamplingParams | None,
        eos: tuple[int, ...],
        stops: tuple[str, ...],
        salt: str = "",
    ) -> Request:
        resolved = self.generation_defaults.resolve(params or SamplingParams(), len(ids))
        if self.tokenizer is None and not (params and params.stop):
            # the checkpoint's: without text there is none to stop at
            resolved = replace(resolved, stop=())
        if stops:
            resolved = replace(resolved, stop=tuple(dict.fromkeys((*resolved.stop, *stops))))
        if resolved.stop and self.tokenizer is None:
            raise TokenizerError(
                f"{self.path} is an ids-only engine (no tokenizer); use stop_token_ids instead of "
                "stop"
            )
        return Request(
            id=f"r{next(self._request_counter)}",
            prompt=tuple(ids),
            params=resolved,
            eos_ids=eos,
            cache_salt=salt,
        )


def _load_defaults(path: Path, manifest: Any, *, openai: bool) -> GenerationDefaults:
    """The defaults of an engine's requests.

    Raises CorruptArtifact where the manifest's make no sense.
    """
    try:
        return read_generation(
            manifest.generation, str(manifest.source.get("container", "")), openai=openai
        )
    except RequestError as error:
        raise CorruptArtifact(
            f"{path}: its generation_config: {error}; rebuild the engine"
        ) from None


def eos_ids(manifest: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an answer: generation_config's, else the config's, else the tokenizer's."""
    for raw in (manifest.generation.get("eos_token_id"), manifest.config.get("eos_token_id")):
        found = raw if isinstance(raw, list) else [raw]
        ids = tuple(id for id in found if type(id) is int and id >= 0)
        if ids:
            return ids
    return tuple(tokenizer.eos_ids) if tokenizer is not None else ()


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt, where it has one."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _base_stops(manifest: Any) -> tuple[str, ...]:
    """Qwen v1's base models end a made-up dialogue at "Human:"."""
    raw = manifest.model_type == "qwen" and manifest.generation.get("chat_format") == "raw"
    return ("Human:",) if raw else ()


def _cache_salt(prompt: Any) -> str:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or len(salt) > 1024):
        raise RequestError("cache_salt must be a text of up to 1024 characters")
    return salt or ""


def _check_ids(ids: Any) -> list[int]:
    if not isinstance(ids, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in ids
    ):
        raise RequestError("prompt_token_ids must be a list of whole numbers")
    return list(ids)


def _with_chat_template(files: dict[str, bytes], source: str | Path) -> dict[str, bytes]:
    """The tokenizer's files with another chat template; of pictures' formats, one of the two may be
    named.
    """
    named = {"minigpt4": "first", "minigpt4-current": "current"}.get(str(source))
    if named is not None and IMAGE_CHAT in files:
        return {**files, IMAGE_CHAT: with_prompt_style(files, named)}
    # a template knows no pictures: the conversation becomes one of texts
    kept = {name: data for name, data in files.items() if name != IMAGE_CHAT}
    return {**kept, "chat_template.jinja": _read_template(source)}


def _read_template(source: str | Path) -> bytes:
    """A chat template: the name of one of ours (vicuna, chatml), a file, or the template's own
    text.
    """
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
        raise UsageError(
            f"--chat-template {source}: neither a file nor a template; shipped are vicuna and "
            "chatml"
        )
    return str(source).encode()

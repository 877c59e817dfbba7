"""Text side of an engine: makes requests in token ids of prompts and conversations.

It needs no torch. LLM and the server share it, so that a prompt has the same ids in both.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modelmill import __version__
from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.core.errors import (
    CorruptArtifact,
    PromptTokenCounts,
    PromptTooLong,
    RequestError,
    TokenizerError,
    UsageError,
)
from modelmill.core.generation_defaults import GenerationDefaults, parse_generation_config
from modelmill.core.quoting import quote
from modelmill.core.types import (
    Grammar,
    Guide,
    ImageEmbeddingSpan,
    Request,
    SamplingParams,
)
from modelmill.request_output_state import RequestOutputState
from modelmill.text import grammar as grammars
from modelmill.text.allowed_tokens import AllowedTokensGuide
from modelmill.text.answer_grammar import PromptThinking, whole_answer_grammar
from modelmill.text.answer_history import AnswerHistory, PromptTail, make_past_answer
from modelmill.text.answer_pieces import ParsedAnswer
from modelmill.text.answer_splice import AnswerSplicer, extract_prompt_tail
from modelmill.text.begun_answer import AssistantPrefill, parse_assistant_prefill
from modelmill.text.chat_format_loader import (
    ChatFormat,
    TemplateChatFormat,
    load_chat_format,
    read_default_template,
)
from modelmill.text.chat_format_registry import (
    load_chat_syntax,
    parser_marks_with_calls,
    parser_marks_without_calls,
)
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text.chat_template_override import list_chat_templates, replace_chat_template
from modelmill.text.image_chat import IMAGE_CHAT_FILE as IMAGE_CHAT
from modelmill.text.image_chat import ImageChatFormat, ImagePart
from modelmill.text.message_validation import Messages
from modelmill.text.thinking_scanner import AnswerThinkingSyntax, make_answer_thinking_syntax
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer
from modelmill.text.tool_call_reader import ToolSchemas

Prompt = str | Mapping[str, Any] | Sequence[int]
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_TOKENIZER_FOLDER = "tokenizer"
THINKING_DETECTION_TAIL_TOKENS = 32
"""Tokens at the end of a prompt that may begin or end the thinking."""


class PromptTruncation(NamedTuple):
    """How a prompt is cut.

    Attributes:
        tokens: Most tokens that are kept.
        side: Where the others are cut off; "left" keeps the last ones.
    """

    tokens: int
    side: Literal["left", "right"] = "left"

    def apply(self, ids: list[int]) -> list[int]:
        """The ids that are kept."""
        return ids[-self.tokens :] if self.side == "left" else ids[: self.tokens]


class _AnswerHistoryQuery(NamedTuple):
    """Where earlier answers in a prompt are looked for, see ``encode_reusing_answers``."""

    sent_messages: Messages
    tool_schemas: ToolSchemas
    cache_salt: str


class _EncodedConversation(NamedTuple):
    """The prompt of a conversation.

    Attributes:
        ids: its tokens.
        spans: its images.
        tail: its end, if answers to it are remembered.
        changes: what was done with its messages so that the chat template takes them.
    """

    ids: list[int]
    spans: tuple[ImageEmbeddingSpan, ...] = ()
    tail: PromptTail | None = None
    changes: tuple[str, ...] = ()


class TextProcessor:
    """Tokenizer, chat format, sampling defaults and stop ids of one engine.

    ``tokenizer`` and ``chat_format`` are None if the engine has none.
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
        """Load tokenizer and chat format.

        Args:
            path: The engine folder, for messages.
            manifest: The engine's manifest.
            files: Tokenizer files by name; empty for an ids-only engine.
            chat_template: Replaces the engine's own template.
            allow_local_files: Whether conversations may name local image files; False for the
                clients of a server.
            openai_defaults: Use the OpenAI API's sampling defaults instead of ours where the
                checkpoint has none.

        Raises:
            TokenizerError: The tokenizer files cannot be used.
            TemplateError: The chat template is invalid.
            UsageError: The chat template cannot be read.
        """
        files = dict(files)
        if chat_template is not None:
            files = replace_chat_template(files, chat_template)
        self.path = path
        self.manifest = manifest
        self._allow_local_files = allow_local_files
        # of an image in a conversation; None: the limit in vision.image_input
        self.max_image_pixels: int | None = None
        # of a prompt's text, unless its request says otherwise: special tokens become their ids
        self.parse_special = False
        self.tokenizer: Tokenizer | None = load_tokenizer(files) if files else None
        self.chat_format: ChatFormat | None = (
            load_chat_format(files, self.tokenizer) if self.tokenizer else None
        )
        self.chat_template_text = "" if IMAGE_CHAT in files else read_default_template(files)
        self.generation_defaults = _load_generation_defaults(path, manifest, openai=openai_defaults)
        self.defaults = dict(self.generation_defaults.values)
        self.eos_ids = resolve_eos_ids(manifest, self.tokenizer)
        self._qwen_raw_stop_strings = _qwen_raw_stop_strings(manifest)
        self._request_counter = itertools.count()
        self._guides: grammars.GuideFactory | None = None
        self._answer_history = AnswerHistory()

    def variant_for_template_kwargs(self, template_kwargs: Mapping[str, object]) -> TextProcessor:
        """Return the processor of a request with these variables of the chat template."""
        chat_format = (
            None
            if self.chat_format is None
            else self.chat_format.variant_for_template_kwargs(template_kwargs)
        )
        if chat_format is self.chat_format:
            return self
        variant = copy.copy(self)
        variant.chat_format = chat_format
        return variant

    def set_input_limits(self, max_image_pixels: int, max_text_tokens: int, context: int) -> None:
        """Refuse larger images and longer texts from now on, as a server does.

        Args:
            max_image_pixels: of an image.
            max_text_tokens: of a text, also of one that is only counted.
            context: tokens that the engine takes.
        """
        self.max_image_pixels = max_image_pixels
        if self.tokenizer is not None:
            self.tokenizer.set_input_token_limit(max_text_tokens, context)

    def set_parse_special(self, parses: bool) -> None:
        """Whether special tokens in a prompt's text are read where its request does not say so."""
        self.parse_special = parses

    def set_answer_history_capacity(self, max_bytes: int) -> None:
        """Remember the tokens of earlier answers in so many bytes from now on; 0: of none."""
        self._answer_history = AnswerHistory(max_bytes)

    @staticmethod
    def from_engine(path: Path, chat_template: str | Path | None = None) -> TextProcessor:
        """The text processor of an engine folder, for a server. Raises ArtifactError as well."""
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
    ) -> RequestOutputState:
        """Make a request of a prompt in any form, or of a conversation, without queueing it.

        Args:
            prompt: Text, mapping, ids or messages.
            params: None uses the engine's defaults.
            grammar: Constrains the output.
            template: Variables of the chat template; only for a conversation.
        """
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self.chat_request(prompt, params, grammar=grammar, **template)
        if template:
            raise UsageError(
                f"{', '.join(template)}: only for a chat template, but the prompt is not a "
                "conversation; leave it out, or pass messages"
            )
        request = self._build_request(
            self.encode_prompt(prompt),
            params,
            self.eos_ids,
            self._qwen_raw_stop_strings,
            _checked_cache_salt(prompt),
        )
        request = replace(request, grammar=grammar)
        follows = grammar is not None or self._has_text_tokens(request.prompt)
        return RequestOutputState(
            request, prompt_text(prompt), self.tokenizer, continues_prompt=follows
        )

    def _has_text_tokens(self, ids: Sequence[int]) -> bool:
        """Whether ids hold more than control tokens (such as BOS)."""
        tokenizer = self.tokenizer
        return tokenizer is not None and any(
            not tokenizer.is_skipped_in_decode(i) and tokenizer.token_bytes(i) for i in ids
        )

    def chat_request(
        self,
        messages: Messages,
        params: SamplingParams | None,
        *,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        calls: bool = False,
        parses_thinking: bool = False,
        thinking_budget: int | None = None,
        add_generation_prompt: bool = True,
        continues: bool = False,
        truncation: PromptTruncation | None = None,
        tool_schemas: ToolSchemas | None = None,
        sent_messages: Messages = (),
        **template: Any,
    ) -> RequestOutputState:
        """Make a request of one conversation, without queueing it.

        Args:
            messages: [{"role", "content"}, …].
            params: None uses the engine's defaults.
            cache_salt: Requests with different salts share no cached prefix.
            grammar: Constrains the output.
            calls: Keep the control tokens that mark tool calls in the text, for the answer parser.
            parses_thinking: Keep those of the thinking; a grammar then allows thinking first.
            thinking_budget: Maximum tokens of the thinking.
            add_generation_prompt: Whether the template begins an answer.
            continues: Whether the answer continues the last message, of the assistant.
            truncation: How the prompt is cut; None: not at all.
            tool_schemas: Names of the tools, with the schemas of their parameters.
            sent_messages: The conversation as its client sent it; answers in it that this engine
                gave are repeated with their own tokens.
            template: Further variables of the chat template.

        Raises:
            UsageError: The engine has no chat template.
        """
        if self.chat_format is None:
            names = ", ".join(list_chat_templates())
            raise UsageError(
                f"{self.path} has no chat template; give one ({names} or a file), or a plain prompt"
            )
        begun = AssistantPrefill()
        if continues:
            begun = parse_assistant_prefill(messages, self.chat_format.thinking)
            if not begun.part:
                messages, add_generation_prompt = messages[:-1], True
        ids, spans, tail, changes = self._encode_conversation(
            messages,
            begun,
            add_generation_prompt,
            _AnswerHistoryQuery(sent_messages, tool_schemas or {}, cache_salt),
            template,
        )
        ids = _truncate_without_images(ids, truncation, bool(spans))
        eos = tuple(dict.fromkeys((*self.eos_ids, *self.chat_format.stop_ids)))
        request = self._build_request(ids, params, eos, self.chat_format.stop_strings, cache_salt)
        # the original MiniGPT-4 passes only embeddings to its language model, BLIP-2 ids as well
        penalize_prompt = self.chat_format.penalize_prompt
        thinking = self.chat_format.thinking if parses_thinking else None
        if thinking_budget is not None and thinking is None:
            raise RequestError(
                "thinking_token_budget: the chat template of this model has no thinking; leave it "
                "out"
            )
        prompt_thinking = self._detect_prompt_thinking(ids, begun)
        grammar = whole_answer_grammar(
            grammar,
            self.chat_format.format_name,
            thinking,
            prompt_thinking,
            thinking_budget,
            len(self._encode_mid_prompt_text(begun.text)) if begun.part == "reasoning" else 0,
        )
        if grammar is not None and grammar.grammar_type == "answer":
            grammars.check_grammar(grammar)
        request = replace(
            request, grammar=grammar, embedding_spans=spans, penalize_prompt=penalize_prompt
        )
        # a grammar checks every byte of the first token, so its leading space must stay in the text
        return RequestOutputState(
            request,
            None,
            self.tokenizer,
            self._visible_control_tokens(calls, thinking is not None),
            continues_prompt=grammar is not None or bool(begun.part),
            prompt_thinking=prompt_thinking,
            prompt_tail=tail,
            begun=begun.part,
            strips_start=self.chat_format.answers_begin_with_space and not begun.part,
            prompt_changes=changes,
            thinking_syntax=self._make_answer_thinking_syntax(
                thinking, prompt_thinking, begun, calls
            ),
        )

    def _make_answer_thinking_syntax(
        self,
        thinking: ThinkingSyntax | None,
        prompt_thinking: PromptThinking,
        begun: AssistantPrefill,
        calls: bool,
    ) -> AnswerThinkingSyntax | None:
        """Return where an answer may have thinking, in which no stop string counts."""
        assert self.chat_format is not None, "a conversation has a chat format"
        syntax = load_chat_syntax(self.chat_format.format_name)
        return make_answer_thinking_syntax(syntax, thinking, prompt_thinking, begun.part, calls)

    def _encode_mid_prompt_text(self, text: str) -> list[int]:
        """Return the ids of a text that does not start the prompt."""
        assert self.tokenizer is not None, "a chat format has a tokenizer"
        return self.tokenizer.encode_pieces(["", text]) if text else []

    def _encode_conversation(
        self,
        messages: Messages,
        begun: AssistantPrefill,
        add_generation_prompt: bool,
        past: _AnswerHistoryQuery,
        template: Mapping[str, Any],
    ) -> _EncodedConversation:
        chat_format = self.chat_format
        assert chat_format is not None, "a conversation has a chat format"
        if isinstance(chat_format, TemplateChatFormat):
            tail: PromptTail | None = None
            if begun.part:
                rendered = chat_format.render_pieces_with_prefill(messages, **template)
            else:
                rendered = chat_format.render_pieces(messages, add_generation_prompt, **template)
                if add_generation_prompt:
                    tail = self._extract_prompt_tail(rendered.pieces)
            ids = self.encode_reusing_answers(rendered.pieces, *past)
            return _EncodedConversation(ids, tail=tail, changes=rendered.changes)
        if not isinstance(chat_format, ImageChatFormat):
            if begun.part:
                return _EncodedConversation(chat_format.encode_with_prefill(messages, **template))
            ids = chat_format.encode(messages, add_generation_prompt, **template)
            return _EncodedConversation(ids)
        if begun.part:
            messages, add_generation_prompt = messages[:-1], True
        ids, images = chat_format.encode_with_images(messages, add_generation_prompt, **template)
        spans = tuple(self._make_image_span(position, image) for position, image in images)
        return _EncodedConversation([*ids, *self._encode_mid_prompt_text(begun.text)], spans)

    def encode_reusing_answers(
        self,
        pieces: Sequence[str | int],
        sent_messages: Messages,
        tool_schemas: ToolSchemas,
        cache_salt: str,
    ) -> list[int]:
        """Return the ids of a rendered conversation; answers of this engine keep their tokens."""
        assert self.tokenizer is not None, "a conversation was rendered for a tokenizer"
        past = self._answer_history.find_answers_per_message(sent_messages, cache_salt)
        if past:
            pieces = self._make_answer_splicer(tool_schemas).splice(pieces, past)
        return self.tokenizer.encode_pieces(pieces)

    def remember_answer(
        self, state: RequestOutputState, token_ids: Sequence[int], answer: ParsedAnswer
    ) -> None:
        """Keep the tokens of a complete answer for prompts that repeat it.

        Args:
            state: The request.
            token_ids: What was generated.
            answer: What its client received of it.
        """
        if state.prompt_tail is None or not token_ids:
            return
        ids = token_ids[:-1] if token_ids[-1] in state.request.eos_ids else token_ids
        thinks = state.prompt_thinking == "open"
        self._answer_history.add(
            make_past_answer(answer, ids, state.prompt_tail, thinks), state.request.cache_salt
        )

    def _extract_prompt_tail(self, pieces: Sequence[str | int]) -> PromptTail | None:
        assert self.tokenizer is not None
        assert self.chat_format is not None
        thinking = self.chat_format.thinking
        end = "".join(
            self.tokenizer.token_bytes(piece).decode("utf-8", "replace")
            if isinstance(piece, int)
            else piece
            for piece in pieces[-THINKING_DETECTION_TAIL_TOKENS:]
        ).rstrip()
        marks = () if thinking is None else thinking.marks
        return extract_prompt_tail(
            pieces, self.tokenizer, thinking if end.endswith(marks) else None
        )

    def _make_answer_splicer(self, tool_schemas: ToolSchemas) -> AnswerSplicer:
        chat_format = self.chat_format
        assert self.tokenizer is not None
        assert isinstance(chat_format, TemplateChatFormat)
        return AnswerSplicer(
            self.tokenizer,
            load_chat_syntax(chat_format.format_name),
            chat_format.thinking,
            chat_format.end_ids | frozenset(self.eos_ids),
            self._visible_control_tokens(bool(tool_schemas), chat_format.thinking is not None),
            tool_schemas,
        )

    def _visible_control_tokens(self, calls: bool, thinking: bool) -> frozenset[int]:
        """Control tokens that the answer parser needs in the text."""
        if self.chat_format is None or self.tokenizer is None:
            return frozenset()
        syntax, special = load_chat_syntax(self.chat_format.format_name), self.tokenizer.special
        marks = set[str]()
        if calls or (thinking and syntax.calls.style == "harmony"):
            marks.update(parser_marks_with_calls(syntax, None))
        marks.update(
            parser_marks_without_calls(syntax, self.chat_format.thinking if thinking else None)
        )
        return frozenset(special[mark] for mark in marks if mark in special)

    def _detect_prompt_thinking(
        self, ids: Sequence[int], begun: AssistantPrefill
    ) -> PromptThinking:
        """What the prompt says of the thinking: by its end, if no answer has begun."""
        thinking = None if self.chat_format is None else self.chat_format.thinking
        if begun.part:
            return begun.prompt_thinking(thinking)
        if thinking is None or self.tokenizer is None:
            return "free"
        end = self.tokenizer.decode(
            list(ids[-THINKING_DETECTION_TAIL_TOKENS:]), skip_special=False
        ).rstrip()
        opening, closing = thinking.marks
        if end.endswith(closing):
            return "closed"
        return "open" if end.endswith(opening) else "free"

    @functools.cached_property
    def checkpoint_defaults(self) -> GenerationDefaults:
        """The defaults without OpenAI's, even if ``openai_defaults`` is set."""
        return _load_generation_defaults(self.path, self.manifest, openai=False)

    @functools.cached_property
    def system_fingerprint(self) -> str:
        """Identifies engine and version: with it unchanged, a seed gives the same text again."""
        versions = f"{__version__}:{self.manifest.digest()}"
        return f"fp_{hashlib.sha256(versions.encode()).hexdigest()[:16]}"

    @property
    def supports_images(self) -> bool:
        """Whether conversations may contain images."""
        return isinstance(self.chat_format, ImageChatFormat)

    def _make_image_span(self, position: int, image: ImagePart) -> ImageEmbeddingSpan:
        """The embedding span of one image; its handle is the pixels for the vision encoder."""
        from modelmill.vision.image_input import decode_data_url, load_image_stretched_to_square

        assert isinstance(self.chat_format, ImageChatFormat), "only this format contains images"
        if not image.is_url and not self._allow_local_files:
            raise RequestError(f"{image.location}: an image must be an image_url with a data URL")
        size = int(self.manifest.config["image_embedder"]["vision_encoder"]["image"])
        source = decode_data_url(image.source, image.location) if image.is_url else image.source
        pixels, digest = load_image_stretched_to_square(
            source, size, image.location, self.max_image_pixels
        )
        return ImageEmbeddingSpan(position, self.chat_format.image_tokens, digest, pixels)

    def encode_prompt(self, prompt: Any) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if ("prompt" in prompt) + ("prompt_token_ids" in prompt) != 1 or set(
                prompt
            ) - PROMPT_KEYS:
                if "role" in prompt:
                    raise RequestError("a message of a conversation is no prompt: use chat()")
                raise RequestError(
                    'a prompt object must have either "prompt" or "prompt_token_ids", and may have '
                    '"cache_salt"'
                )
            if "prompt_token_ids" in prompt:
                return _check_prompt_ids_are_ints(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TokenizerError(
                    f"{self.path} is an ids-only engine (no tokenizer); give prompt_token_ids "
                    "(run: in --file)"
                )
            return self.tokenizer.encode(prompt)
        return _check_prompt_ids_are_ints(prompt)

    def make_guide(self, request: Request, vocab: int) -> Guide:
        """Make the guide of a request with a grammar.

        Args:
            request: The request.
            vocab: Size of the logits.

        Raises:
            RequestError: The engine has no tokenizer, or the grammar is invalid.
        """
        assert request.grammar is not None, "a guide follows a grammar"
        allowed_ids = request.grammar.allowed_token_ids()
        if allowed_ids is not None:
            return AllowedTokensGuide(allowed_ids, vocab)
        if self.tokenizer is None:
            raise RequestError("structured output needs a tokenizer, and this engine has none")
        if self._guides is None:
            stops = () if self.chat_format is None else self.chat_format.stop_ids
            self._guides = grammars.GuideFactory(self.tokenizer, vocab, (*self.eos_ids, *stops))
        ends = (
            () if request.params.ignore_eos else (*request.eos_ids, *request.params.stop_token_ids)
        )
        return self._guides.make_guide(request.grammar, ends)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Most bytes of one token; at least 16, since a tokenizer may drop spaces of a text."""
        tokenizer = self.tokenizer
        return (
            16
            if tokenizer is None
            else max(16, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
        )

    def check_prompt_length(self, prompt: str | Sequence[int], max_tokens: int) -> None:
        """Raise PromptTooLong if a prompt has more than ``max_tokens`` tokens in any tokenization.

        Cheap: it lets the server refuse an oversized text without tokenizing it.
        """
        if isinstance(prompt, str):
            if len(prompt) > max_tokens * self.max_token_bytes:
                raise PromptTooLong(
                    f"the prompt has {len(prompt)} characters, this engine takes {max_tokens} "
                    "tokens; shorten it"
                )
        elif len(prompt) > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, this engine takes {max_tokens}; shorten it",
                PromptTokenCounts(len(prompt), max_tokens),
            )

    def _build_request(
        self,
        ids: list[int],
        params: SamplingParams | None,
        eos: tuple[int, ...],
        stops: tuple[str, ...],
        salt: str = "",
    ) -> Request:
        resolved = self.generation_defaults.resolve(params or SamplingParams(), len(ids))
        if self.tokenizer is None and not (params and params.stop):
            # drop the checkpoint's stop strings: an ids-only engine has no text
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


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; a list of token ids is one prompt. Raises RequestError."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"a prompt is a text, a list of token ids or an object, not {quote(prompts, 60)}"
        )
    prompts = list(prompts)
    is_ids = bool(prompts) and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts)
    return [prompts] if is_ids else prompts


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """Parameters for each of ``count`` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams | None) for one in params
    ):
        raise RequestError(
            "sampling parameters must be one SamplingParams for all prompts, or a list with one "
            "per prompt"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one, or one per prompt"
        )
    return list(params)


def check_sampling_params_type(params: SamplingParams | None) -> SamplingParams | None:
    """Return the parameters of one prompt; RequestError if they are of another type."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"sampling parameters must be SamplingParams, not {type(params).__name__}"
        )
    return params


def _truncate_without_images(
    ids: list[int], truncation: PromptTruncation | None, has_images: bool
) -> list[int]:
    """A truncated prompt, the whole one for None. Raises RequestError with images."""
    if truncation is None or len(ids) <= truncation.tokens:
        return ids
    if has_images:
        raise RequestError("a prompt with images cannot be truncated; shorten it")
    return truncation.apply(ids)


def check_no_sampling_keywords(names: Iterable[str]) -> None:
    """Check that no keyword is a field of SamplingParams, which one argument holds.

    Raises:
        UsageError: if one is.
    """
    known = {each.name for each in fields(SamplingParams)}
    wrong = next((name for name in names if name in known), None)
    if wrong is not None:
        raise UsageError(f"{wrong} is a field of SamplingParams: pass SamplingParams({wrong}=…)")


def _load_generation_defaults(path: Path, manifest: Any, *, openai: bool) -> GenerationDefaults:
    """The sampling defaults of an engine. Raises CorruptArtifact if the manifest's are invalid."""
    try:
        return parse_generation_config(
            manifest.generation, str(manifest.source.get("container", "")), openai=openai
        )
    except RequestError as error:
        raise CorruptArtifact(
            f"{path}: its generation_config: {error}; rebuild the engine"
        ) from None


def resolve_eos_ids(manifest: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """EOS ids: those of generation_config, else of the config, else of the tokenizer."""
    for raw in (manifest.generation.get("eos_token_id"), manifest.config.get("eos_token_id")):
        candidates = raw if isinstance(raw, list) else [raw]
        ids = tuple(id for id in candidates if type(id) is int and id >= 0)
        if ids:
            return ids
    return tuple(tokenizer.eos_ids) if tokenizer is not None else ()


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt; None if it consists of ids."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _qwen_raw_stop_strings(manifest: Any) -> tuple[str, ...]:
    """Stop strings of base models: Qwen v1 invents a dialogue, which ends at "Human:"."""
    raw = manifest.model_type == "qwen" and manifest.generation.get("chat_format") == "raw"
    return ("Human:",) if raw else ()


def _checked_cache_salt(prompt: Any) -> str:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or len(salt) > 1024):
        raise RequestError("cache_salt must be a string of up to 1024 characters")
    return salt or ""


def _check_prompt_ids_are_ints(ids: Any) -> list[int]:
    if not isinstance(ids, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in ids
    ):
        raise RequestError("prompt_token_ids must be a list of integers")
    return list(ids)

"""Conversations → prompt ids, in the format the model was trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from modelmill.core.errors import RequestError, TemplateError
from modelmill.text.answer_parser import AnswerParser, make_answer_parser
from modelmill.text.answer_pieces import BegunPart
from modelmill.text.begun_answer import parse_assistant_prefill, render_assistant_prefill
from modelmill.text.chat_format import ChatFormat
from modelmill.text.chat_format_registry import (
    detect_chat_format,
    detect_thinking_marks,
    load_chat_syntax,
    select_format_variant,
)
from modelmill.text.chat_syntax import NO_MARKS
from modelmill.text.control_token_guard import (
    ControlTokenGuard,
    find_unused_mark_char,
    iter_strings,
    remove_guard_chars,
)
from modelmill.text.image_chat import IMAGE_CHAT_FILE as IMAGE_CHAT
from modelmill.text.image_chat import load_image_chat_format
from modelmill.text.message_validation import (
    ChatRenderArgs,
    Messages,
    check_json_data,
    validate_and_normalize_messages,
)
from modelmill.text.prompt_format import CHAT_FORMAT_FILE, load_prompt_format
from modelmill.text.qwen_chat_format import HISTORY_WINDOW_TOKENS, IM_END, IM_START, QwenChatFormat
from modelmill.text.role_order import iter_role_rearrangements
from modelmill.text.tag_suffix import expand_format_calls
from modelmill.text.template_probe import (
    AcceptedCallForms,
    adapt_messages,
    probe_call_forms,
    template_accepts_text_parts,
)
from modelmill.text.template_process import (
    TemplateLimits,
    TemplateProcess,
    TemplateRefusedMessages,
)
from modelmill.text.thinking_switch import rename_thinking_variable
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tokenizer_files import parse_json_file
from modelmill.text.tool_call_reader import ToolSchemas

__all__ = ["ChatFormat", "TemplateLimits", "TemplateChatFormat", "load_chat_format"]

# control tokens that end a turn in some model families but are not their EOS
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<|end_of_msg|>",
)
EXTRA_TEMPLATES_FOLDER = "additional_chat_templates"
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}


def load_chat_format(
    files: Mapping[str, bytes], tokenizer: Tokenizer, *, limits: TemplateLimits | None = None
) -> ChatFormat | None:
    """Return the chat format of a model; None for a base model.

    Templates come from chat_template.jinja and additional_chat_templates, tokenizer_config.json,
    chat_template.json or GGUF metadata; a Qwen v1 vocabulary without a template has its built-in
    format, unless generation_config.json has the chat format "raw"; that file's max_window_size
    limits its history. chat_format.json names a built-in format (``prompt_format``) and has
    precedence over templates. A vision-language model has its own format, whatever template its
    language model has.

    Raises:
        TemplateError: if a template is not a string.
    """
    if IMAGE_CHAT in files:
        return load_image_chat_format(files, tokenizer)
    if CHAT_FORMAT_FILE in files:
        return load_prompt_format(files, tokenizer)
    templates = read_chat_templates(files)
    if templates:
        return TemplateChatFormat(templates, tokenizer, limits=limits)
    if (
        tokenizer.tokenizer_type == "tiktoken"
        and IM_START in tokenizer.special
        and IM_END in tokenizer.special
    ):
        settings = parse_json_file(files, "generation_config.json")
        if settings.get("chat_format") == "raw":
            return None
        window = settings.get("max_window_size")
        return QwenChatFormat(
            tokenizer,
            window=window if type(window) is int and window > 0 else HISTORY_WINDOW_TOKENS,
        )
    return None


def read_chat_templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return templates by name; "default" is for conversations without tools. {} if none exist."""
    templates = _templates_with_own_files(files)
    if "default" not in templates:
        templates = _templates_in_configs(files) | templates
    if "default" not in templates and templates:
        templates["default"] = next(iter(templates.values()))
    return templates


def read_default_template(files: Mapping[str, bytes]) -> str:
    """Return the chat template for conversations without tools as text; "" if there is none."""
    if not files or CHAT_FORMAT_FILE in files:
        return ""
    return read_chat_templates(files).get("default", "")


def _templates_in_configs(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the templates of the tokenizer's config, or else of the other files, by name."""
    template_entry: object = parse_json_file(files, "tokenizer_config.json").get("chat_template")
    file = "tokenizer_config.json"
    if template_entry is None and "chat_template.json" in files:
        file = "chat_template.json"
        template_entry = parse_json_file(files, file).get("chat_template")
    if template_entry is None and "gguf_vocab.json" in files:
        file = "the GGUF file"
        metadata = parse_json_file(files, "gguf_vocab.json")
        template_entry = metadata.get("tokenizer.chat_template", metadata.get("chat_template"))
    if template_entry is None or template_entry == "":
        return {}
    if isinstance(template_entry, dict):  # by name, as transformers has them in memory
        template_entry = [{"name": n, "template": text} for n, text in template_entry.items()]
    entries = (
        template_entry
        if isinstance(template_entry, list)
        else [{"name": "default", "template": template_entry}]
    )
    templates: dict[str, str] = {}
    for entry in entries:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise TemplateError(
                f"{file}: chat_template must be a string, a list of {{name, template}}, or an "
                "object name → template"
            )
        templates[name] = text
    return templates


def _templates_with_own_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the templates that have files of their own, by name."""
    templates: dict[str, str] = {}
    for file in files:
        folder, _, name = file.removesuffix(".jinja").rpartition("/")
        if file != "chat_template.jinja" and folder != EXTRA_TEMPLATES_FOLDER:
            continue
        try:
            templates[name if folder else "default"] = files[file].decode("utf-8")
        except UnicodeDecodeError:
            raise TemplateError(f"{file} is not UTF-8 text; copy the file again") from None
    return templates


class RenderedPieces(NamedTuple):
    """A prompt before it is encoded.

    Attributes:
        pieces: texts and, where the template wrote control tokens, their ids.
        changes: what was done with the messages so that the template takes them, one line each.
    """

    pieces: list[str | int]
    changes: tuple[str, ...]


class _GuardedText(NamedTuple):
    """What a template wrote, with marks in it; begun: text that stands behind the prompt."""

    prompt: str
    begun: str
    mark: str
    changes: tuple[str, ...]

    def pieces(self, tokenizer: Tokenizer) -> RenderedPieces:
        """Return texts without marks, and ids."""
        pieces = [*tokenizer.split_control_tokens(self.prompt), *filter(None, [self.begun])]
        return RenderedPieces(
            [
                remove_guard_chars(each, self.mark) if isinstance(each, str) else each
                for each in pieces
            ],
            self.changes,
        )

    @property
    def text(self) -> str:
        """The text without marks."""
        return remove_guard_chars(self.prompt + self.begun, self.mark)


class TemplateChatFormat(ChatFormat):
    """A Jinja template in its own process; text of a user never becomes a control token."""

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        limits: TemplateLimits | None = None,
    ) -> None:
        self._templates = dict(templates)
        self._tokenizer = tokenizer
        self._process = TemplateProcess(limits)
        self._guard = ControlTokenGuard(tokenizer.special)
        template_text = expand_format_calls("".join(templates.values()))
        self.format_name = detect_chat_format(template_text, tokenizer.special)
        syntax = load_chat_syntax(self.format_name)
        self.thinking = detect_thinking_marks(syntax, template_text)
        ends = [
            tokenizer.special[text]
            for text in TURN_ENDS
            if text in tokenizer.special
            and text in template_text
            and text not in syntax.not_turn_ends
        ]
        self.stop_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *ends]))
        # a template may end a message of an earlier turn with another token than the model does
        message_ends = (tokenizer.special[end] for end in TURN_ENDS if end in tokenizer.special)
        self.end_ids = frozenset((*self.stop_ids, *message_ends))
        self.writes_calls = "tool_calls" in template_text
        self.reads_reasoning_effort = "reasoning_effort" in template_text
        self._parts: dict[tuple[str, bool, str], bool] = {}
        self._calls: dict[tuple[str, bool], AcceptedCallForms] = {}

    def encode(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> list[int]:
        """See ``ChatFormat.encode``."""
        rendered = self.render_pieces(messages, add_generation_prompt, **template)
        return self._tokenizer.encode_pieces(rendered.pieces)

    def render_pieces(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> RenderedPieces:
        """Return the prompt as text and, where the template wrote control tokens, their ids."""
        marked = self._render_guarded_text(messages, add_generation_prompt, **template)
        return marked.pieces(self._tokenizer)

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> str:
        """See ``ChatFormat.render``."""
        return self._render_guarded_text(messages, add_generation_prompt, **template).text

    def encode_with_prefill(
        self, messages: Messages, **template: Unpack[ChatRenderArgs]
    ) -> list[int]:
        """See ``ChatFormat.encode_with_prefill``."""
        return self._tokenizer.encode_pieces(
            self.render_pieces_with_prefill(messages, **template).pieces
        )

    def render_pieces_with_prefill(
        self, messages: Messages, **template: Unpack[ChatRenderArgs]
    ) -> RenderedPieces:
        """Return the prompt of ``encode_with_prefill`` as ``render_pieces`` does."""
        return self._render_guarded_with_prefill(messages, **template).pieces(self._tokenizer)

    def render_with_prefill(self, messages: Messages, **template: Unpack[ChatRenderArgs]) -> str:
        """See ``ChatFormat.render_with_prefill``."""
        return self._render_guarded_with_prefill(messages, **template).text

    def close(self) -> None:
        """End the template process; the next rendering starts another."""
        self._process.close()

    def _render_guarded_text(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> _GuardedText:
        """Render the template."""
        template, values = self._template_and_variables(messages, tools, options)
        mark = find_unused_mark_char([template, *self._tokenizer.special, *iter_strings(values)])
        marked = self._guard.insert_guard_chars(values, mark)
        text, changes = self._render_template(template, marked, add_generation_prompt)
        return _GuardedText(text, "", mark, changes)

    def _render_guarded_with_prefill(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> _GuardedText:
        """Render a conversation that the answer continues; see ``render_assistant_prefill``."""
        parse_assistant_prefill(messages, self.thinking)
        template, values = self._template_and_variables(messages, tools, options)
        texts = [template, *self._tokenizer.special, *iter_strings(values)]
        chars = list[str]()
        while len(chars) < 3:
            chars.append(find_unused_mark_char([*texts, *chars]))
        mark, end, reasoning_end = chars
        marked = self._guard.insert_guard_chars(values, mark)

        changes = dict[str, None]()

        def render(conversation: Messages, add_generation_prompt: bool) -> str:
            variables = {**marked, "messages": list(conversation)}
            text, changed = self._render_template(template, variables, add_generation_prompt)
            changes.update(dict.fromkeys(changed))
            return text

        prompt, begun = render_assistant_prefill(
            render, marked["messages"], self.thinking, (end, reasoning_end)
        )
        return _GuardedText(prompt, begun, mark, tuple(changes))

    def _template_and_variables(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:
        """Return the template for a request, and what the request gives to it."""
        template = self._templates.get(
            "tool_use" if tools else "default", self._templates["default"]
        )
        adapted = self._adapt_messages(
            validate_and_normalize_messages(messages, as_sent=True), template, bool(tools)
        )
        request_variables: dict[str, Any] = {
            "messages": adapted,
            "tools": _validate_tool_list(tools),
            "documents": None,
        }
        for key, value in rename_thinking_variable(options or {}, template).items():
            if key in RESERVED_VARIABLES or key in self._tokenizer.template_names:
                raise RequestError(
                    f"the template option {key!r} is set by the engine; leave it out"
                )
            check_json_data(value, f"the template option {key[:40]!r}")
            request_variables[key] = value
        return template, request_variables

    def _render_template(
        self, template: str, request_variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> tuple[str, tuple[str, ...]]:
        """Return what the template writes, and what was done so that it takes the messages."""
        variables = {
            **self._tokenizer.template_names,
            **request_variables,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._process.render(template, variables), ()
        except TemplateRefusedMessages as refusal:
            for messages, changes in iter_role_rearrangements(request_variables["messages"]):
                with contextlib.suppress(TemplateRefusedMessages):
                    ordered = {**variables, "messages": messages}
                    return self._process.render(template, ordered), changes
            raise refusal

    def _adapt_messages(
        self, messages: list[dict[str, Any]], template: str, tools: bool
    ) -> list[dict[str, Any]]:
        """Convert messages to the forms that the template reads; unknown forms are probed."""
        variables = {
            **self._tokenizer.template_names,
            "tools": [_PROBE_TOOL] if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }

        def render(conversation: Sequence[Mapping[str, Any]]) -> str:
            return self._process.render(template, {**variables, "messages": list(conversation)})

        def parts(role: str) -> bool:
            key = template, tools, role
            if key not in self._parts:
                self._parts[key] = template_accepts_text_parts(render, role)
            return self._parts[key]

        def calls() -> AcceptedCallForms:
            key = template, tools
            if key not in self._calls:
                self._calls[key] = probe_call_forms(render)
            return self._calls[key]

        adapted = adapt_messages(messages, parts, calls)
        if "message.thinking" in template:  # gpt-oss's name of it
            adapted = [_add_gpt_oss_thinking_key(message) for message in adapted]
        return adapted


def _add_gpt_oss_thinking_key(message: dict[str, Any]) -> dict[str, Any]:
    """Give the thinking under gpt-oss's name; its template refuses it beside content and calls."""
    both = message.get("content") and message.get("tool_calls")
    if both or not message.get("reasoning_content"):
        return message
    return {**message, "thinking": message["reasoning_content"]}


def _validate_tool_list(tools: object) -> list[Mapping[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects")
    check_json_data(tools, "tools")
    return list(tools)


def make_chat_answer_parser(
    chat_format: ChatFormat | None,
    tools: ToolSchemas,
    *,
    thinks: bool,
    continues: bool,
    max_calls: int | None = None,
    forced: bool = False,
    begun: BegunPart = "",
    schema: bool = False,
    options: Mapping[str, object] | None = None,
) -> AnswerParser | None:
    """Make the parser of an answer in a chat; None if it is content without marks.

    ``options`` are the request's variables of the template. The other arguments are those of
    ``make_answer_parser``.
    """
    if chat_format is None:
        return None
    name, thinking = select_format_variant(
        chat_format.format_name, chat_format.thinking, options or {}
    )
    syntax = load_chat_syntax(name)
    if not (tools or thinking or syntax.content != NO_MARKS):
        return None
    return make_answer_parser(
        syntax,
        tools,
        thinking=thinking,
        thinks=thinks,
        continues=continues,
        max_calls=max_calls,
        forced=forced,
        begun=begun,
        schema=schema,
    )

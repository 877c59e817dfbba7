"""Built-in chat formats of families whose checkpoints have no chat template.

A format is one file of ``prompt_formats`` with a ``FORMAT``, a subclass of ``PromptFormat``. Which
one an engine uses is in its ``chat_format.json``: the build names it (``checkpoint.chat_format``),
or ``--chat-template``. Facts are from the publishers' code; the code is ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from modelmill.core.chat_format_file import CHAT_FORMAT_FILE as CHAT_FORMAT_FILE
from modelmill.core.errors import RequestError, TemplateError
from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.text.begun_answer import parse_assistant_prefill
from modelmill.text.chat_format import TemplatelessChatFormat
from modelmill.text.chat_format_registry import NO_TOOLS_CHAT_FORMAT
from modelmill.text.message_validation import (
    ChatRenderArgs,
    Messages,
    validate_and_normalize_messages,
)
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tokenizer_files import parse_json_file

PROMPT_FORMATS_PACKAGE = "modelmill.text.prompt_formats"
Segment = str | int
"""A text, which most formats tokenize apart from its neighbours, or the id of a control token."""


class TurnMessage(NamedTuple):
    """A message of the user or of the assistant."""

    role: str
    content: str


class PromptFormat(TemplatelessChatFormat):
    """A conversation as segments: one system text perhaps, then turns of user and assistant.

    User text never becomes control tokens.

    Attributes:
        name: of the file.
        has_system: whether the first message may be a system text.
        answer_header: what the model writes before an answer, where a prompt begins one.
    """

    format_name = NO_TOOLS_CHAT_FORMAT
    name = ""
    has_system = True
    answer_header = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation_config: Mapping[str, Any],  # noqa: ARG002
    ) -> None:
        """Make the format.

        Args:
            tokenizer: the model's tokenizer.
            generation_config: the checkpoint's; {} without one.

        Raises:
            TemplateError: if the vocabulary lacks the format's control tokens.
        """
        self._tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)

    @abstractmethod
    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """Return the prompt's segments.

        Args:
            system: the system text; "" without one.
            turns: of user and assistant, alternating; the first is the user's.
            add_generation_prompt: whether the prompt ends with the beginning of an answer.
        """

    def encode(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> list[int]:
        """See ``ChatFormat.encode``."""
        return self.encode_segments(
            self.segments(*self._split(messages, **template), add_generation_prompt)
        )

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt."""
        return [
            id
            for segment in segments
            for id in (
                [segment]
                if isinstance(segment, int)
                else self._tokenizer.encode(segment, bos=False)
            )
        ]

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> str:
        """See ``ChatFormat.render``."""
        segments = self.segments(*self._split(messages, **template), add_generation_prompt)
        return "".join(
            self._tokenizer.token_bytes(segment).decode("utf-8", "replace")
            if isinstance(segment, int)
            else segment
            for segment in segments
        )

    def encode_with_prefill(
        self, messages: Messages, **template: Unpack[ChatRenderArgs]
    ) -> list[int]:
        """See ``ChatFormat.encode_with_prefill``."""
        if not self.answer_header:
            return super().encode_with_prefill(messages, **template)
        text = parse_assistant_prefill(messages, None).text
        ids, encode = self.encode(messages[:-1], True, **template), self._tokenizer.encode
        return [*ids, *encode(self.answer_header, bos=False), *encode(text, bos=False)]

    def render_with_prefill(self, messages: Messages, **template: Unpack[ChatRenderArgs]) -> str:
        """See ``ChatFormat.render_with_prefill``."""
        text = parse_assistant_prefill(messages, None).text
        return self.render(messages[:-1], True, **template) + self.answer_header + text

    def control_id(self, text: str) -> int:
        """Return the id of a control token; raises TemplateError if the vocabulary lacks it."""
        try:
            return self._tokenizer.special[text]
        except KeyError:
            raise TemplateError(
                f"the chat format {self.name} needs the control token {text}, which this "
                "tokenizer does not have; choose another --chat-template"
            ) from None

    def _split(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[TurnMessage]]:
        """Return the system text and the turns.

        Raises:
            RequestError: for messages, tools or options that the format does not have.
        """
        if tools:
            raise RequestError(f"the chat format {self.name} has no tools")
        if options:
            raise RequestError(
                f"the template option {sorted(options)[0][:40]!r} is unknown: the chat format "
                f"{self.name} has no option; leave it out"
            )
        system, turns = "", list[TurnMessage]()
        for index, message in enumerate(validate_and_normalize_messages(messages)):
            role, content = message["role"], message["content"]
            if role == "system" and index == 0 and self.has_system:
                system = content
                continue
            expected = "assistant" if turns and turns[-1].role == "user" else "user"
            if role != expected or message.get("tool_calls"):
                first = "one system message may come first, then " if self.has_system else ""
                raise RequestError(
                    f"messages[{index}]: in the chat format {self.name} {first}user and assistant "
                    "texts alternate, the user's first"
                )
            turns.append(TurnMessage(role, content))
        return system, turns


def list_prompt_formats() -> list[str]:
    """Return the names of all built-in chat formats."""
    return list_module_names(PROMPT_FORMATS_PACKAGE)


def load_prompt_format(files: Mapping[str, bytes], tokenizer: Tokenizer) -> PromptFormat:
    """Load the built-in chat format that chat_format.json names.

    Raises:
        TemplateError: if there is none of that name, or the vocabulary is of another model.
    """
    name = parse_json_file(files, CHAT_FORMAT_FILE).get("name")
    module = (
        import_module_if_exists(PROMPT_FORMATS_PACKAGE, name) if isinstance(name, str) else None
    )
    if module is None:
        raise TemplateError(
            f"{CHAT_FORMAT_FILE} names no known chat format; there are "
            f"{', '.join(list_prompt_formats())}; rebuild the engine"
        )
    format_class: type[PromptFormat] = module.FORMAT
    return format_class(tokenizer, parse_json_file(files, "generation_config.json"))

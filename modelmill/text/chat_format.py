"""What a chat format is for the rest of the engine: conversations → prompt ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol, Unpack

from modelmill.text.begun_answer import parse_assistant_prefill
from modelmill.text.chat_format_registry import select_format_variant
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text.message_validation import ChatRenderArgs, Messages
from modelmill.text.tokenizer_base import Tokenizer


class ChatFormat(Protocol):
    """A chat format: converts conversations to prompts.

    Attributes:
        stop_ids: an answer ends at any of these.
        stop_strings: or before any of these.
        format_name: how answers are written, see ``chat_formats``.
        thinking: marks of the thinking, if the template has them.
        writes_calls: whether it writes earlier calls.
        reads_reasoning_effort: whether it reads the variable reasoning_effort.
        answers_begin_with_space: whether models write whitespace before an answer that is no part
            of it.
        penalize_prompt: whether penalties include the prompt's ids.
    """

    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    format_name: str
    thinking: ThinkingSyntax | None = None
    writes_calls: bool = False
    reads_reasoning_effort: bool = False
    answers_begin_with_space: bool = False
    penalize_prompt: bool = True

    def encode(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> list[int]:
        """Return the prompt ids, with BOS if the format has one.

        Args:
            messages: [{"role", "content", …}]; content: a string or [{"type": "text", "text"}, …].
            add_generation_prompt: whether the prompt ends with the beginning of an answer.
            template: tools and template options.

        Raises:
            RequestError: if a message is invalid.
            TemplateError: if the template fails.
        """

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> str:
        """Return the same prompt as text."""

    def encode_with_prefill(
        self, messages: Messages, **template: Unpack[ChatRenderArgs]
    ) -> list[int]:
        """Return the prompt ids of a conversation whose last message the answer continues.

        Raises:
            RequestError: as ``encode``, and if the last message cannot be continued.
        """

    def render_with_prefill(self, messages: Messages, **template: Unpack[ChatRenderArgs]) -> str:
        """Return the same prompt as text."""
        begun = parse_assistant_prefill(messages, self.thinking)
        return self.render(messages[:-1], True, **template) + begun.text

    def variant_for_template_kwargs(self, template_kwargs: Mapping[str, object]) -> ChatFormat:
        """Return the format of answers to a prompt with these variables of the template."""
        name, thinking = select_format_variant(self.format_name, self.thinking, template_kwargs)
        if (name, thinking) == (self.format_name, self.thinking):
            return self
        variant = copy.copy(self)
        variant.format_name, variant.thinking = name, thinking
        return variant

    def close(self) -> None:
        """End the template process, if one runs."""


class TemplatelessChatFormat(ChatFormat):
    """A chat format whose prompts code writes, without a template."""

    _tokenizer: Tokenizer

    def encode_with_prefill(
        self, messages: Messages, **template: Unpack[ChatRenderArgs]
    ) -> list[int]:
        """See ``ChatFormat.encode_with_prefill``."""
        begun = parse_assistant_prefill(messages, self.thinking)
        ids = self.encode(messages[:-1], True, **template)
        # the empty piece: the text does not start the prompt
        return [*ids, *self._tokenizer.encode_pieces(["", begun.text])]

    def close(self) -> None:
        """Do nothing: there is no template process."""

"""Qwen v1's own chat format: ChatML from token ids, history cut to a window, tools by ReAct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from modelmill.core.errors import RequestError
from modelmill.text import react_tools as react
from modelmill.text.chat_format import TemplatelessChatFormat
from modelmill.text.message_validation import (
    ChatRenderArgs,
    Messages,
    validate_and_normalize_messages,
)
from modelmill.text.tokenizer_base import Tokenizer

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful assistant."
HISTORY_WINDOW_TOKENS = 6144


class QwenChatFormat(TemplatelessChatFormat):
    """Qwen v1's chat format; role, newline and content are tokenized separately, as in training.

    User text never becomes control tokens.
    """

    format_name = "qwen_react"

    def __init__(self, tokenizer: Tokenizer, *, window: int = HISTORY_WINDOW_TOKENS) -> None:
        """Make the format.

        Args:
            tokenizer: a Qwen v1 tokenizer.
            window: the newest turns are kept while they and the system prompt have fewer tokens.
        """
        self._tokenizer = tokenizer
        self._window = window
        self._start, self._end = tokenizer.special[IM_START], tokenizer.special[IM_END]
        self._newline = tokenizer.encode("\n", bos=False)
        self.stop_ids = (self._end, self._start)

    def encode(
        self, messages: Messages, add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> list[int]:  # fmt: skip
        """Return the prompt ids.

        Raises:
            RequestError: if this format lacks the order of roles or an option.
        """
        blocks, continues = self._kept_blocks_and_continuation(messages, **template)
        ids = [
            id
            for role, content in blocks
            for id in self._newline + self._encode_block(role, content)
        ][len(self._newline) :]
        if not add_generation_prompt:
            return ids
        if continues:
            return ids[:-1]
        return [
            *ids,
            *self._newline,
            self._start,
            *self._tokenizer.encode("assistant", bos=False),
            *self._newline,
        ]

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        **template: Unpack[ChatRenderArgs],
    ) -> str:
        """Return the same prompt as text; raises RequestError as ``encode``."""
        blocks, continues = self._kept_blocks_and_continuation(messages, **template)
        text = "\n".join(f"{IM_START}{role}\n{content}{IM_END}" for role, content in blocks)
        if not add_generation_prompt:
            return text
        return text.removesuffix(IM_END) if continues else f"{text}\n{IM_START}assistant\n"

    def _kept_blocks_and_continuation(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[tuple[str, str]], bool]:
        """Return (role and text of each kept block, whether to continue the last answer)."""
        if options:
            raise RequestError(
                f"the template option {sorted(options)[0][:40]!r} is unknown: Qwen's chat format "
                "has no option; leave it out"
            )
        conversation = validate_and_normalize_messages(messages)
        if not react.conversation_uses_tools(conversation, tools):
            system, history, query = self._split_system_history_query(conversation)
            return [
                ("system", system),
                *(
                    pair
                    for turn in self._truncate_history_to_window(system, history)
                    for pair in turn
                ),
                *query,
            ], False
        parsed = react.to_react_conversation(conversation, tools)
        system = DEFAULT_SYSTEM if parsed.system is None else parsed.system
        turns = [[("user", question), ("assistant", answer)] for question, answer in parsed.turns]
        if parsed.question is None:
            # as upstream: if the last answer is continued, all history is kept
            return [("system", system), *(pair for turn in turns for pair in turn)], True
        kept = [pair for turn in self._truncate_history_to_window(system, turns) for pair in turn]
        return [("system", system), *kept, ("user", parsed.question)], False

    def _split_system_history_query(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[list[tuple[str, str]]], list[tuple[str, str]]]:
        """Return (system prompt, finished turns oldest first, the open question)."""
        system = DEFAULT_SYSTEM
        turns: list[list[tuple[str, str]]] = []
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system" and index == 0:
                system = content
            elif role not in ("user", "assistant"):
                raise RequestError(
                    f"messages[{index}]: Qwen's chat format has one system message, the first, "
                    "then user and "
                    "assistant texts"
                )
            elif role == "user" or not turns:
                turns.append([(role, content)])
            else:
                turns[-1].append((role, content))
        open_question = bool(turns) and turns[-1][-1][0] == "user"
        return (system, turns[:-1], turns[-1]) if open_question else (system, turns, [])

    def _truncate_history_to_window(
        self, system: str, history: list[list[tuple[str, str]]]
    ) -> list[list[tuple[str, str]]]:
        size = len(self._encode_block("system", system))
        for count, turn in enumerate(reversed(history)):
            size += len(self._encode_turn(turn))
            if size >= self._window:
                return history[len(history) - count :]
        return history

    def _encode_turn(self, turn: list[tuple[str, str]]) -> list[int]:
        return [
            id for role, content in turn for id in self._newline + self._encode_block(role, content)
        ]

    def _encode_block(self, role: str, content: str) -> list[int]:
        encode = self._tokenizer.encode
        words = encode(role, bos=False) + self._newline + encode(content, bos=False)
        return [self._start, *words, self._end]

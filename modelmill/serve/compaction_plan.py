"""What of a conversation a compaction keeps, what it summarizes, and in how many tokens.

A summary that would not make the conversation shorter is not written. A conversation that nearly
fills the context is summarized without its beginning, and of the user's messages the newest stay.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compaction import (
    compacted_items,
    is_user_message,
    join_successive_user_messages,
    summary_prompt,
)
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.discriminated_unions import make_converted_request
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.image_fields import rename_image_in_error
from modelmill.serve.message_fitting import FittedMessages, fit_messages
from modelmill.serve.responses_schema import (
    CompactRequest,
    items_to_messages,
    iter_image_field_paths,
)
from modelmill.serve.routes.chat import chat_request_state
from modelmill.text_processor import TextProcessor

MIN_SAVED_TOKENS = 32
"""A conversation that would not become so much shorter with an empty summary stays as it is."""
SUMMARY_SHARE_OF_REPLACED = 1 / 2
SUMMARY_SHARE_OF_CONTEXT = 1 / 4
"""The shorter of both is the limit of a summary, unless the request has one."""
USER_SHARE_OF_CONTEXT = 1 / 2
"""Of the user's messages so many stay, and of a summary with a limit of its own."""
UNCHANGED_WARNING = (
    "input: a summary would not make the conversation shorter; its items are returned as they were"
)


@dataclass(frozen=True)
class CompactionPlan:
    """How a conversation is compacted.

    Attributes:
        kept: messages of the user that stay.
        max_summary_tokens: limit of the summary; 0: the conversation stays as it is.
        num_tokens: of the conversation.
        source: what is summarized.
        warnings: what is lost.
    """

    kept: Sequence[Any]
    max_summary_tokens: int
    num_tokens: int
    source: FittedMessages
    warnings: Sequence[str]


class Compactor:
    """Counts the tokens of one request's conversation and plans its compaction."""

    def __init__(
        self, text_processor: TextProcessor, body: CompactRequest, max_model_len: int
    ) -> None:
        self._text_processor, self._body = text_processor, body
        self._max_model_len = max_model_len

    def plan(self, items: Sequence[Any], num_earlier: int = 0) -> CompactionPlan:
        """Plan the compaction of these items.

        Args:
            items: of the conversation.
            num_earlier: how many of them ``previous_response_id`` stands for.

        Raises:
            RequestError: an item is invalid, or there is no room for a summary.
        """
        num_tokens = self._count_tokens_renaming_image_errors(items, num_earlier)
        kept, warnings = self._newest_user_messages_and_warnings(items)
        saved = num_tokens - self.count_tokens(compacted_items(kept, "", ""))
        if saved < MIN_SAVED_TOKENS:
            return CompactionPlan((), 0, num_tokens, FittedMessages([]), (UNCHANGED_WARNING,))
        limit = self._summary_limit(saved)
        source = fit_messages(
            items_to_messages(list(items), self._body.instructions),
            self._max_model_len - limit,
            lambda messages: len(self._summary_state(messages, limit).request.prompt),
            self._count_text_tokens,
        )
        if source.num_dropped or source.num_cut:
            warnings.append(
                f"input: of what is summarized, the oldest {source.num_dropped} messages are left "
                f"out and {source.num_cut} cut, so that it fits into the context of "
                f"{self._max_model_len} tokens"
            )
        return CompactionPlan(kept, limit, num_tokens, source, warnings)

    def make_summary_request_and_state(
        self, plan: CompactionPlan
    ) -> tuple[ChatRequest, RequestOutputState]:
        """The request of the summary."""
        messages = _with_summary_prompt(plan.source.messages, plan.max_summary_tokens)
        chat = self._chat_request(messages, plan.max_summary_tokens)
        if getattr(self._text_processor.chat_format, "thinking", None) is not None:
            # where a template cannot switch it off, it would use up the limit
            chat = chat.model_copy(update={"thinking_token_budget": 0})
        return chat, chat_request_state(self._text_processor, chat, self._max_model_len)

    def is_shorter(self, items: Sequence[Any], plan: CompactionPlan) -> bool:
        """Whether items have fewer tokens than the conversation that they replace."""
        return self.count_tokens(items) < plan.num_tokens

    def count_tokens(self, items: Sequence[Any]) -> int:
        """Tokens of the prompt that the items make."""
        messages = items_to_messages(list(items), self._body.instructions)
        return len(self._make_request_state(messages).request.prompt)

    def _count_tokens_renaming_image_errors(self, items: Sequence[Any], num_earlier: int) -> int:
        """As ``count_tokens``; an error about a picture names the client's field."""
        try:
            return self.count_tokens(items)
        except RequestError as error:
            messages = items_to_messages(list(items), self._body.instructions)
            named = rename_image_in_error(
                str(error), messages, lambda: iter_image_field_paths(items, num_earlier)
            )
            raise error if named is None else error.reworded(named) from None

    def _summary_limit(self, saved: int) -> int:
        """Tokens of the summary.

        Args:
            saved: tokens that an empty summary would save.
        """
        share = min(
            int(saved * SUMMARY_SHARE_OF_REPLACED),
            int(self._max_model_len * SUMMARY_SHARE_OF_CONTEXT),
        )
        if self._body.max_output_tokens is None:
            return max(share, 1)
        most = int(self._max_model_len * USER_SHARE_OF_CONTEXT)
        return max(min(self._body.max_output_tokens, saved, most), 1)

    def _newest_user_messages_and_warnings(
        self, items: Sequence[Any]
    ) -> tuple[list[Any], list[str]]:
        """The user's messages that stay, and a warning if there are others."""
        messages = [item for item in items if is_user_message(item)]
        room = int(self._max_model_len * USER_SHARE_OF_CONTEXT)
        alone = self.count_tokens(compacted_items([], "", ""))

        def is_too_long(count: int) -> bool:
            kept = compacted_items(messages[len(messages) - count :], "", "")
            return self.count_tokens(kept) - alone > room

        count = len(messages)
        if is_too_long(count):
            # the more stay, the longer they are together
            count = bisect.bisect_left(range(1, count), True, key=is_too_long)
        dropped = len(messages) - count
        if not dropped:
            return messages, []
        warning = (
            f"input: the oldest {dropped} messages of the user are in the summary alone: all of "
            f"them take more than half of the context of {self._max_model_len} tokens"
        )
        return messages[dropped:], [warning]

    def _count_text_tokens(self, text: str) -> int:
        tokenizer = self._text_processor.tokenizer
        return 0 if tokenizer is None else len(tokenizer.encode_pieces(["", text]))

    def _summary_state(
        self, messages: Sequence[Mapping[str, Any]], limit: int
    ) -> RequestOutputState:
        return self._make_request_state(_with_summary_prompt(messages, limit))

    def _make_request_state(self, messages: Sequence[Mapping[str, Any]]) -> RequestOutputState:
        """The request of a conversation, which may be longer than the context."""
        chat = self._chat_request(messages, None)
        limit = max_tokenize_tokens(self._max_model_len)
        return chat_request_state(self._text_processor, chat, limit)

    def _chat_request(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> ChatRequest:
        chat = make_converted_request(
            ChatRequest,
            {
                "model": self._body.model,
                "messages": list(messages),
                "max_completion_tokens": max_tokens,
                "cache_salt": self._body.cache_salt,
            },
        )
        chat.check()
        return with_thinking(chat, self._text_processor, False)


def _with_summary_prompt(messages: Sequence[Mapping[str, Any]], limit: int) -> list[dict[str, Any]]:
    return join_successive_user_messages(
        [*messages, {"role": "user", "content": summary_prompt(limit)}]
    )

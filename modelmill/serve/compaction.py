"""Compaction of a conversation: the model's own summary in place of what it said and read.

The user's messages stay as they are, the newest ones if they are many. Clients pass the summary on
unread (``encrypted_content_codec``). ``compaction_plan`` says how long each part may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.encrypted_content_codec import compress_text
from modelmill.serve.response_input_items import fill_item_defaults
from modelmill.text.role_order import join_successive_messages

SUMMARY_PROMPT = (
    "Summarize the conversation so far for yourself: you will go on with it and see nothing of it "
    "but my messages and this summary. Keep goals, decisions, names, numbers, file paths, results "
    "of tools and open tasks. Write only the summary, in at most {words} words."
)
SUMMARY_INTRO = "Summary of the conversation so far:\n"
TOKENS_PER_WORD = 2
"""The prompt asks for so many fewer words than the summary may have tokens."""


def summary_prompt(max_tokens: int) -> str:
    """The message that asks for a summary of up to so many tokens."""
    return SUMMARY_PROMPT.format(words=max(max_tokens // TOKENS_PER_WORD, 1))


def is_user_message(item: Any) -> bool:
    """Whether an item is a message of the user."""
    return (
        isinstance(item, Mapping)
        and (item.get("type") or "message") == "message"
        and item.get("role") == "user"
    )


def join_successive_user_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make successive chat messages of the user one: many templates refuse two in a row.

    Where a compaction has left out the answers between them, they are successive.
    """
    return join_successive_messages(messages, ("user",))


def compacted_items(messages: Sequence[Any], id: str, summary: str) -> list[dict[str, Any]]:
    """Messages of the user with id, status and parts, as OpenAI's, and the summary of the rest.

    Args:
        messages: of the user, which stay.
        id: of the item with the summary.
        summary: the model's.
    """
    return [
        *fill_message_item_defaults(messages, id),
        {"type": "compaction", "id": id, "encrypted_content": compress_text(summary)},
    ]


def fill_message_item_defaults(items: Sequence[Any], id: str) -> list[dict[str, Any]]:
    """Items as they were sent; messages with id, status and parts, as OpenAI's.

    Args:
        items: to return.
        id: of which the ids of messages without one are made.
    """
    suffix = id.partition("_")[2]
    return [
        fill_item_defaults(item, f"{suffix}_{index}")
        if (item.get("type") or "message") == "message"
        else dict(item)
        for index, item in enumerate(items)
    ]

"""Compaction of a conversation: the model's own summary in place of what it said and read.

The user's messages stay as they are. Clients pass the summary on unread
(``encrypted_content_codec``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.encrypted_content_codec import compress_text
from modelmill.serve.response_input_items import fill_item_defaults

SUMMARY_PROMPT = (
    "Summarize the conversation so far for yourself: you will go on with it and see nothing of it "
    "but my messages and this summary. Keep goals, decisions, names, numbers, file paths, results "
    "of tools and open tasks. Write only the summary."
)
SUMMARY_INTRO = "Summary of the conversation so far:\n"


def compacted_items(items: Sequence[Any], id: str, summary: str) -> list[dict[str, Any]]:
    """The user's messages with id, status and parts, as OpenAI's, and the summary of the rest.

    Args:
        items: of the conversation.
        id: of the item with the summary.
        summary: the model's.
    """
    suffix = id.partition("_")[2]
    messages = [
        fill_item_defaults(item, f"{suffix}_{index}")
        for index, item in enumerate(items)
        if isinstance(item, Mapping)
        and item.get("type", "message") == "message"
        and item.get("role") == "user"
    ]
    return [
        *messages,
        {"type": "compaction", "id": id, "encrypted_content": compress_text(summary)},
    ]

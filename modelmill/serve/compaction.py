"""Compaction of a conversation: the model's own summary in place of what it said and read.

The user's messages stay as they are. Clients pass the summary on unread (``packed_text``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.serve.packed_text import pack_text

PROMPT = (
    "Summarize the conversation so far for yourself: you will go on with it and see nothing of it "
    "but my messages and this summary. Keep goals, decisions, names, numbers, file paths, results "
    "of tools and open tasks. Write only the summary."
)
INTRO = "Summary of the conversation so far:\n"


def compacted_items(items: Sequence[Any], id: str, summary: str) -> list[dict[str, Any]]:
    """The user's messages, and the summary of the rest as an item of its own."""
    messages = [
        dict(item)
        for item in items
        if isinstance(item, Mapping)
        and item.get("type", "message") == "message"
        and item.get("role") == "user"
    ]
    return [
        *messages,
        {"type": "compaction", "id": id, "encrypted_content": pack_text(summary)},
    ]

"""Compaction of a conversation: the model's own summary in place of what it said and read.

The user's messages stay as they are. The summary is not encrypted, as the field's name says at its
origin: it is text of the client's own conversation, packed so that clients pass it on unread.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError

PROMPT = (
    "Summarize the conversation so far for yourself: you will go on with it and see nothing of it "
    "but my messages and this summary. Keep goals, decisions, names, numbers, file paths, results "
    "of tools and open tasks. Write only the summary."
)
INTRO = "Summary of the conversation so far:\n"
PREFIX = "mm1:"
MAX_SUMMARY_BYTES = 1 << 20


def pack_summary(text: str) -> str:
    """The content of a compaction item."""
    return PREFIX + base64.b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


def unpack_summary(content: str) -> str:
    """The summary in a compaction item.

    Raises:
        RequestError: it is none of this server's.
    """
    try:
        if not content.startswith(PREFIX):
            raise ValueError
        data = base64.b64decode(content.removeprefix(PREFIX), validate=True)
        packed = zlib.decompressobj()
        text = packed.decompress(data, MAX_SUMMARY_BYTES).decode()
        if packed.unconsumed_tail:
            raise ValueError
    except (ValueError, binascii.Error, zlib.error):
        raise RequestError(
            "encrypted_content is not of this server: compact the conversation here"
        ) from None
    return text


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
        {"type": "compaction", "id": id, "encrypted_content": pack_summary(summary)},
    ]

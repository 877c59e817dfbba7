"""Pictures in results of tools, for a model that reads text only: each becomes a line of text.

A tool answers with a picture unasked (a browser's screenshot, a file that an agent reads). Refused,
it would be in the conversation for good, and every later turn be refused, too. A picture that a
user sends is another matter: the error tells the user that this model does not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IMAGE_PLACEHOLDER_TEXT = "[a picture, which this model cannot see]"
IMAGE_PART_TYPES = ("image_url", "image")


def replace_tool_images_with_text(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the conversation with text in the place of these pictures, and warnings."""
    out, count = list[Mapping[str, Any]](), 0
    for message in messages:
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, list):
            out.append(message)
            continue
        pictures = sum(map(is_image_part, content))
        count += pictures
        text = {"type": "text", "text": IMAGE_PLACEHOLDER_TEXT}
        parts = [text if is_image_part(part) else part for part in content]
        out.append({**message, "content": parts} if pictures else message)
    what = "a picture" if count == 1 else f"{count} pictures"
    line = f"messages: {what} in results of tools became a text: the model has no vision encoder"
    return out, [line] if count else []


def is_image_part(part: Any) -> bool:
    """Whether a part of a message is a picture."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PART_TYPES

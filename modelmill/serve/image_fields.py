"""Names a picture that an error is about by the field that the client sent it in.

A conversation of another API becomes a chat request, whose messages and parts are others: systems
come first, turns are joined. The order of the pictures stays, so the n-th is the client's n-th.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from modelmill.serve.tool_image_placeholders import is_image_part

ImageFields = Callable[[], Iterator[str]]
"""The fields of a request's pictures, in order."""
_CHAT_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")


def rename_image_in_error(
    text: str, messages: Sequence[Mapping[str, Any]], fields: ImageFields
) -> str | None:
    """Return an error about a picture with the client's name of it; None if it is about no picture.

    Args:
        text: of the error, which begins with a part of the chat request's messages.
        messages: of the chat request.
        fields: of the client's request.
    """
    place = _CHAT_PART.match(text)
    if place is None:
        return None
    index, part_index = int(place[1]), int(place[2])
    before = [part for message in messages[:index] for part in _parts(message)]
    parts = _parts(messages[index]) if index < len(messages) else []
    if part_index >= len(parts) or not is_image_part(parts[part_index]):
        return None
    number = sum(map(is_image_part, [*before, *parts[:part_index]]))
    field = next(islice(fields(), number, None), None)
    return None if field is None else field + text[place.end() :]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []

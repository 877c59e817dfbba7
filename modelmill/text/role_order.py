"""Conversations whose order of roles a chat template refuses, in an order that it may take.

Agents send several messages of the user in a row and system messages between the turns, while many
templates want one system message at the start, if any, and roles that alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def rearrange_roles(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the conversation in other orders of roles; every text stays, in its place.

    First successive messages of the user are one, and so are system messages at the start; later
    system messages are the user's. Then the user's first message begins with the system message.
    """
    joined = _join_successive(messages)
    if joined != list(messages):
        yield joined
    if joined and joined[0]["role"] == "system":
        first, *others = joined
        yield _join_successive([{**first, "role": "user"}, *others])


def join_contents(one: Any, other: Any) -> Any:
    """The contents of two messages as that of one: a blank line between texts, or all parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in (one, other)
    )
    return [part for content in parts for part in content]


def _join_successive(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    out: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and any(each["role"] != "system" for each in out):
            message = {**message, "role": "user"}
        if out and message["role"] == out[-1]["role"] and message["role"] in ("system", "user"):
            content = join_contents(out[-1]["content"], message["content"])
            out[-1] = {**out[-1], "content": content}
        else:
            out.append(message)
    return out

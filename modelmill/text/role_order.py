"""Conversations whose order of roles a chat template refuses, in an order that it may take.

Agents send several messages of the user in a row and system messages between the turns, while many
templates want one system message at the start, if any, and roles that alternate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any


def rearrange_roles(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversation in other orders of roles; every text stays, in its place.

    First successive messages of the user are one, and so are system messages at the start; later
    system messages are the user's. Then the user's first message begins with the system message.
    """
    joined = join_successive(_with_late_system_as_user(messages))
    if joined != list(messages):
        yield joined
    if joined and joined[0]["role"] == "system":
        first, *others = joined
        yield join_successive([{**first, "role": "user"}, *others])


def join_successive(
    messages: Iterable[Mapping[str, Any]], roles: Collection[str] = ("system", "user")
) -> list[dict[str, Any]]:
    """The messages, of which those that follow one another in one of the roles are one."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] and message["role"] in roles:
            out[-1]["content"] = _join_contents(out[-1]["content"], message["content"])
        else:
            out.append(dict(message))
    return out


def _join_contents(one: Any, other: Any) -> Any:
    """The contents of two messages as that of one: a blank line between texts, or all parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in (one, other)
    )
    return [part for content in parts for part in content]


def _with_late_system_as_user(
    messages: Iterable[Mapping[str, Any]],
) -> Iterator[Mapping[str, Any]]:
    """The messages; of the system's only those at the start are its own."""
    begins = True
    for message in messages:
        begins = begins and message["role"] == "system"
        late = not begins and message["role"] == "system"
        yield {**message, "role": "user"} if late else message

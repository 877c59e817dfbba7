"""Conversations whose order of roles a chat template refuses, in an order that it may take.

Agents send several messages of one role in a row and system messages between the turns, while many
templates want one system message at the start, if any, and roles that alternate.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_REASON = "the chat template refuses the order of roles that was sent"
LATE_SYSTEM_WARNING = f"messages: a system message after the start became the user's: {_REASON}"
SYSTEM_IN_USER_MESSAGE_WARNING = (
    f"messages: the user's first message begins with the system message: {_REASON}"
)
JOINED_MESSAGES_WARNINGS = {
    "system": f"messages: system messages in a row became one: {_REASON}",
    "user": f"messages: messages of the user in a row became one: {_REASON}",
    "assistant": f"messages: messages of the assistant in a row became one: {_REASON}",
}
"""What is said where successive messages of a role are one."""
_REASONING_KEYS = ("reasoning_content", "thinking")


class RearrangedMessages(NamedTuple):
    """A conversation in another order of roles.

    Attributes:
        messages: of which every text stays.
        changes: what was done, one line each.
    """

    messages: list[dict[str, Any]]
    changes: tuple[str, ...]


def iter_role_rearrangements(messages: Sequence[Mapping[str, Any]]) -> Iterator[RearrangedMessages]:
    """Yield the conversation in other orders of roles, those that change less first.

    Successive messages of the system or the user are one, then also those of the assistant; then
    later system messages are the user's; then the user's first message begins with the system's.
    """
    tried: list[list[Any]] = [list(messages)]
    for shift, joins_answers in itertools.product(
        (_keep_roles, _late_system_to_user, _every_system_to_user), (False, True)
    ):
        shifted, change = shift(messages)
        roles = ("system", "user", "assistant") if joins_answers else ("system", "user")
        joined = join_successive_messages(shifted, roles)
        if joined in tried:
            continue
        tried.append(joined)
        lines = [
            JOINED_MESSAGES_WARNINGS[role] for role in roles if _has_successive(messages, role)
        ]
        yield RearrangedMessages(joined, (*change, *lines))


def join_successive_messages(
    messages: Iterable[Mapping[str, Any]], roles: Collection[str] = ("system", "user")
) -> list[dict[str, Any]]:
    """The messages, of which those that follow one another in one of the roles are one."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and message["role"] == out[-1]["role"] and message["role"] in roles:
            out[-1] = _join_messages(out[-1], message)
        else:
            out.append(dict(message))
    return out


def _join_messages(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one; calls stand behind the contents of both."""
    joined = {**one, "content": _join_contents(one["content"], other["content"])}
    for key in _REASONING_KEYS:
        texts = [each[key] for each in (one, other) if each.get(key)]
        if texts:
            joined[key] = "\n\n".join(texts)
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _join_contents(one: Any, other: Any) -> Any:
    """The contents of two messages as that of one: a blank line between texts, or all parts."""
    if not one or not other:  # beside calls
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in (one, other)
    )
    return [part for content in parts for part in content]


_Shifted = tuple[list[Mapping[str, Any]], tuple[str, ...]]
"""Messages, and what was done with their roles."""


def _keep_roles(messages: Sequence[Mapping[str, Any]]) -> _Shifted:
    return list(messages), ()


def _late_system_to_user(messages: Sequence[Mapping[str, Any]]) -> _Shifted:
    """The messages; of the system's only those at the start are its own."""
    start = list(itertools.takewhile(_is_system, messages))
    rest = messages[len(start) :]
    return [*start, *map(_system_as_user, rest)], (LATE_SYSTEM_WARNING,) if any(
        map(_is_system, rest)
    ) else ()


def _every_system_to_user(messages: Sequence[Mapping[str, Any]]) -> _Shifted:
    """The messages without a system's."""
    shifted, change = _late_system_to_user(messages)
    has_start = _is_system(messages[0])
    return list(map(_system_as_user, shifted)), (
        SYSTEM_IN_USER_MESSAGE_WARNING,
        *change,
    ) if has_start else change


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _system_as_user(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "user"} if _is_system(message) else message


def _has_successive(messages: Sequence[Mapping[str, Any]], role: str) -> bool:
    return any(one["role"] == other["role"] == role for one, other in itertools.pairwise(messages))

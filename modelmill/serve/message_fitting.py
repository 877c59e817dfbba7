"""Shortens a conversation at its beginning until it has a number of tokens.

The oldest messages are left out, and of the oldest that stays the beginning of the text is cut. A
call of a tool and its result go together, and a message of the user stays the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import RequestError

Message = Mapping[str, Any]
ELLIPSIS = "…"
"""In the place of text that was cut, and of messages that were left out."""
MAX_SHORTENING_ROUNDS = 32
"""Of counting: what a template writes is known only once the conversation is rendered."""
MESSAGE_TEXT_KEYS = ("reasoning_content", "content")
"""Keys of messages whose text may be cut."""


@dataclass(frozen=True)
class FittedMessages:
    """A conversation that was shortened.

    Attributes:
        messages: what is left.
        num_dropped: messages that were left out.
        num_cut: messages whose text was cut.
    """

    messages: list[Message]
    num_dropped: int = 0
    num_cut: int = 0


def fit_messages(
    messages: Sequence[Message],
    limit: int,
    count_tokens: Callable[[Sequence[Message]], int],
    count_text_tokens: Callable[[str], int],
) -> FittedMessages:
    """Shorten a conversation.

    Args:
        messages: of which the system's at the beginning stay.
        limit: tokens of the rendered conversation.
        count_tokens: of a rendered conversation.
        count_text_tokens: of a text.

    Raises:
        RequestError: there is no room for the end of the last message.
    """
    num_tokens = count_tokens(messages)
    excess = num_tokens - limit
    if excess <= 0:
        return FittedMessages(list(messages))
    shortener = _Shortener(messages, num_tokens, count_text_tokens)
    for _ in range(MAX_SHORTENING_ROUNDS):
        shortener.remove_tokens(excess)
        excess = count_tokens(shortener.messages) - limit
        if excess <= 0:
            return FittedMessages(shortener.messages, shortener.num_dropped, len(shortener.cut))
    raise _no_summary_room_error()


class _Shortener:
    """Removes text from the beginning of a conversation.

    Attributes:
        num_dropped: messages that were left out.
        cut: indices of the messages whose text was cut.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        num_tokens: int,
        count_text_tokens: Callable[[str], int],
    ) -> None:
        first = next(
            (i for i, each in enumerate(messages) if each["role"] != "system"), len(messages)
        )
        self._head = list(messages[:first])
        self._rest: dict[int, Message] = dict(enumerate(messages[first:]))
        self._count_text_tokens = count_text_tokens
        text_tokens = sum(map(self._count_message_tokens, messages))
        # what the template writes around a message, and too much rather than too little of it:
        # what is removed beyond the excess would be lost for nothing
        self._tokens_around = max(num_tokens - text_tokens, 0) // len(messages)
        self.num_dropped = 0
        self.cut: set[int] = set()

    @property
    def messages(self) -> list[Message]:
        """What is left; templates want the first one to be the user's."""
        rest = list(self._rest.values())
        starts_inside = self.num_dropped and rest and rest[0]["role"] != "user"
        note = [{"role": "user", "content": ELLIPSIS}] if starts_inside else []
        return [*self._head, *note, *rest]

    def remove_tokens(self, excess: int) -> None:
        """Remove about so many tokens, at least a little.

        Raises:
            RequestError: nothing is left that could be removed.
        """
        while excess > 0:
            group = self._oldest_group()
            size = sum(
                self._count_message_tokens(self._rest[index]) + self._tokens_around
                for index in group
            )
            is_last = len(group) == len(self._rest)
            if size > excess or is_last:
                if self._cut_group_texts(group, excess):
                    return
                if is_last:
                    raise _no_summary_room_error()
            for index in group:
                del self._rest[index]
                self.cut.discard(index)
            self.num_dropped += len(group)
            excess -= size

    def _oldest_group(self) -> list[int]:
        """Indices of the oldest message, and of the results of the calls in it."""
        first, *others = self._rest
        group = [first]
        if self._rest[first].get("tool_calls"):
            for index in others:
                if self._rest[index]["role"] != "tool":
                    break
                group.append(index)
        return group

    def _count_message_tokens(self, message: Message) -> int:
        calls = message.get("tool_calls")
        texts = [text for _, _, text in _iter_texts(message)]
        if calls:
            texts.append(json.dumps(calls, ensure_ascii=False))
        return sum(map(self._count_text_tokens, texts))

    def _cut_group_texts(self, group: Sequence[int], excess: int) -> bool:
        """Cut texts of a group at their front; False if that cannot remove so many tokens."""
        size = sum(
            self._count_text_tokens(text)
            for index in group
            for _, _, text in _iter_texts(self._rest[index])
        )
        if size <= excess + len(group):
            return False
        was_cut = False
        for index in group:
            for key, part, text in list(_iter_texts(self._rest[index])):
                count = self._count_text_tokens(text)
                if text == ELLIPSIS or not count:
                    continue
                # the mark is a token or two itself
                share = min((excess + 2) / count, 1.0)
                kept = text.removeprefix(ELLIPSIS)[max(int(len(text) * share), 1) :]
                self._rest[index] = _replace_text(self._rest[index], key, part, f"{ELLIPSIS}{kept}")
                self.cut.add(index)
                was_cut = True
                excess -= count
                if excess <= 0:
                    return True
        return was_cut


def _iter_texts(message: Message) -> Iterator[tuple[str, int | None, str]]:
    """(key, index of the part, text) of what a message says."""
    for key in MESSAGE_TEXT_KEYS:
        value = message.get(key)
        if isinstance(value, str):
            yield key, None, value
        elif isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    yield key, index, part["text"]


def _replace_text(message: Message, key: str, part: int | None, text: str) -> Message:
    if part is None:
        return {**message, key: text}
    parts = list(message[key])
    parts[part] = {**parts[part], "text": text}
    return {**message, key: parts}


def _no_summary_room_error() -> RequestError:
    return RequestError(
        "input: beside the instructions there is no room for a summary; shorten the instructions"
    )

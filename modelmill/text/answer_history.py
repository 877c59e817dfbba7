"""Remembers the tokens of earlier answers, so that later prompts repeat them exactly.

A client sends back what was parsed from an answer: thinking, content and calls. A chat template
writes that in its own form, with other blanks, orders of keys or escapes than the model wrote. The
tokens then differ from those in the prefix cache, and from what the model has said.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall

MAX_HISTORY_BYTES = 32 << 20
"""Memory for the answers of one engine: eight million tokens."""
MAX_ANSWERS_PER_MESSAGE = 4
"""Answers that are kept of one message: the model may write the same in several ways."""
PAST_ANSWER_OVERHEAD_BYTES = 1024
MAX_EXACT_INTEGER = 2.0**53

Piece = str | int
"""A part of a prompt: text, or the id of a token."""


@dataclass(frozen=True)
class PromptTail:
    """The end of the prompt of an answer.

    Attributes:
        base: its last pieces, with at least one control token; long texts as their digests.
        thinking: what follows: the thinking that the prompt began or excluded.
    """

    base: tuple[Piece | bytes, ...]
    thinking: tuple[Piece, ...] = ()


@dataclass(eq=False)
class PastAnswer:
    """The tokens of an answer.

    Attributes:
        ids: without the token that ended it.
        tail: the end of its prompt.
        thinks: whether the prompt began the thinking.
        message: digest of what was sent to the client.
        stripped_message: the same without blanks at both ends of the content.
        reasoning: its thinking, without blanks at both ends, as a digest; empty if there was none.
        call_ids: ids of its calls.
        usable: whether its tokens say what was sent; None: not checked yet.
    """

    ids: array[int]
    tail: PromptTail
    thinks: bool
    message: bytes
    stripped_message: bytes
    reasoning: bytes
    call_ids: tuple[str, ...]
    usable: bool | None = field(default=None)

    def set_usable(self, usable: bool) -> None:
        """Keep the result of the check."""
        self.usable = usable

    @property
    def size_bytes(self) -> int:
        """Its bytes, about."""
        return self.ids.itemsize * len(self.ids) + PAST_ANSWER_OVERHEAD_BYTES


def make_past_answer(
    answer: ParsedAnswer, ids: Sequence[int], tail: PromptTail, thinks: bool
) -> PastAnswer:
    """Return the record of an answer; ids: its tokens without the one that ended it."""
    call_ids = tuple(call.id for call in answer.calls)
    return PastAnswer(
        array("i", ids),
        tail,
        thinks,
        content_and_calls_digest(answer),
        content_and_calls_digest(answer, strips=True),
        stripped_text_digest(answer.reasoning),
        call_ids,
    )


class AnswerHistory:
    """The latest answers of one engine, by what was sent to the client. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_HISTORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._answers: OrderedDict[tuple[str, bytes], list[PastAnswer]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, answer: PastAnswer, salt: str) -> None:
        """Remember an answer; requests with another salt do not find it."""
        if answer.size_bytes > self._max_bytes:
            return
        key = salt, answer.message
        with self._lock:
            answers = self._answers.setdefault(key, [])
            self._answers.move_to_end(key)
            answers.insert(0, answer)
            self._bytes += answer.size_bytes
            while len(answers) > MAX_ANSWERS_PER_MESSAGE:
                self._bytes -= answers.pop().size_bytes
            while self._bytes > self._max_bytes:
                _, oldest = self._answers.popitem(last=False)
                self._bytes -= sum(each.size_bytes for each in oldest)

    def find_answers_per_message(
        self, messages: Sequence[Mapping[str, Any]], salt: str
    ) -> list[list[PastAnswer]]:
        """Return the answers that the messages of a conversation may be.

        Args:
            messages: the conversation, as sent.
            salt: of the request.

        Returns:
            One list for each message of the assistant that was found, the likeliest answer first.
        """
        out: list[list[PastAnswer]] = []
        with self._lock:
            if not self._answers:
                return out
            for message in messages:
                answer = _parse_assistant_message(message)
                if answer is None:
                    continue
                key = salt, content_and_calls_digest(answer)
                if key in self._answers:
                    self._answers.move_to_end(key)
                    out.append(_rank_answers_by_ids_and_thinking(self._answers[key], answer))
        return out


def content_and_calls_digest(answer: ParsedAnswer, *, strips: bool = False) -> bytes:
    """Return the digest of content and calls, whatever the form of the arguments.

    Args:
        answer: what counts of it are content, names and arguments.
        strips: whether blanks at both ends of the content do not count.
    """
    calls = [[call.name, canonical_arguments(call.arguments)] for call in answer.calls]
    content = answer.content.strip() if strips else answer.content
    return stripped_text_digest(json.dumps([content, calls]))


def stripped_text_digest(text: str) -> bytes:
    """Return the digest of a text without blanks at both ends; empty for a blank one."""
    body = text.strip()
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).digest() if body else b""


def canonical_arguments(arguments: str) -> str:
    """Return JSON text in one form: sorted keys, and integers without a fraction.

    JavaScript knows no difference between 1 and 1.0. Other text is returned as it is.
    """
    try:
        return json.dumps(json.loads(arguments, parse_float=_integral_float_to_int), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _integral_float_to_int(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < MAX_EXACT_INTEGER else value


def _parse_assistant_message(message: Mapping[str, Any]) -> ParsedAnswer | None:
    """Convert a message of the assistant; None for other messages and forms."""
    if message.get("role") != "assistant":
        return None
    content, calls = message.get("content"), list[ParsedToolCall]()
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(text for text in texts if isinstance(text, str))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments)
            except (TypeError, ValueError, RecursionError):
                return None
        calls.append(ParsedToolCall(str(call.get("id")), str(function.get("name")), arguments))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return ParsedAnswer(
        content if isinstance(content, str) else "",
        tuple(calls),
        reasoning if isinstance(reasoning, str) else "",
    )


def _rank_answers_by_ids_and_thinking(
    answers: Sequence[PastAnswer], message: ParsedAnswer
) -> list[PastAnswer]:
    call_ids = tuple(call.id for call in message.calls)
    reasoning = stripped_text_digest(message.reasoning)

    def differences(answer: PastAnswer) -> tuple[bool, bool]:
        other_thinking = bool(reasoning) and answer.reasoning != reasoning
        return answer.call_ids != call_ids, other_thinking

    return sorted(answers, key=differences)

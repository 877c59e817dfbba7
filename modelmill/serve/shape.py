"""From answers to OpenAI's JSON: choices, log-probabilities, usage, chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from modelmill.answer import Completion
from modelmill.core.types import Logprob
from modelmill.dialogue import Dialogue
from modelmill.text.stream import Detokenizer
from modelmill.text.tokenizer import Tokenizer

LEAST = -9999.0
"""JSON has no minus infinity."""
DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event, of a name where it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumped(value) + b"\n\n"


class Envelope:
    """Events that differ in their only choice: what they share is written once, not with every token."""

    def __init__(self, head: Mapping[str, Any], tail: Mapping[str, Any]) -> None:
        """head, tail: the keys before and after ``choices``; neither is a key of the other."""
        self._before = event({**head, "choices": []}).removesuffix(b"]}\n\n")
        self._after = b"]" + (b"," + dumped(tail)[1:] if tail else b"}") + b"\n\n"

    def around(self, choice: Mapping[str, Any]) -> bytes:
        """``event({**head, "choices": [choice], **tail})``."""
        return self._before + dumped(choice) + self._after


def dumped(value: Any) -> bytes:
    """JSON in UTF-8. Halves of a surrogate pair, which a request may bring and UTF-8 cannot write, become ``?``."""
    return _JSON.encode(value).encode("utf-8", "replace")


class Json(JSONResponse):
    """A response that any value of a request may stand in."""

    def render(self, content: Any) -> bytes:
        """As ``dumped``."""
        return dumped(content)


def usage(dialogues: Iterable[Dialogue]) -> dict[str, Any]:
    """Counts of tokens."""
    prompt = completion = cached = 0
    for dialogue in dialogues:
        answer = dialogue.answer
        prompt += len(answer.prompt_token_ids)
        completion += sum(len(output.token_ids) for output in answer.outputs)
        cached += answer.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatLogprobs:
    """logprobs of one choice of a conversation, a piece at a time."""

    def __init__(self, tokenizer: Tokenizer | None, top: int) -> None:
        self._tokenizer, self._top, self._told = tokenizer, top, 0

    def take(self, output: Completion, count: int) -> dict[str, Any] | None:
        """The next ``count`` tokens'; None where none were asked for."""
        if output.logprobs is None:
            return None
        begin, self._told = self._told, self._told + count
        pairs = zip(output.token_ids[begin : self._told], output.logprobs[begin : self._told])
        return {"content": [self._entry(id, entries) for id, entries in pairs], "refusal": None}

    def _entry(self, id: int, entries: Mapping[int, Logprob]) -> dict[str, Any]:
        top = list(entries.items())[: self._top]
        return {
            **self._one(id, entries[id]),
            "top_logprobs": [self._one(other, value) for other, value in top],
        }

    def _one(self, id: int, value: Logprob) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(value.logprob), "bytes": list(data)}


class TextLogprobs:
    """logprobs of one choice of a completion in the older shape, a piece at a time; offsets are in characters."""

    def __init__(
        self, tokenizer: Tokenizer | None, top: int, *, follows: bool = False, skip_special: bool = True
    ) -> None:
        """follows, skip_special: as of the dialogue."""
        self._tokenizer, self._top, self._told, self._offset = tokenizer, top, 0, 0
        self._text = None if tokenizer is None else Detokenizer(tokenizer, skip_special=skip_special, follows=follows)

    def prompt(self, dialogue: Dialogue) -> dict[str, Any]:
        """Those of the prompt; the first token has none."""
        answer = dialogue.answer
        entries = answer.prompt_logprobs or [None] * len(answer.prompt_token_ids)
        return self._table(answer.prompt_token_ids, entries, None if self._text is None else self._text.before)

    def take(self, output: Completion, count: int) -> dict[str, Any] | None:
        """The next ``count`` tokens'; None where none were asked for."""
        if output.logprobs is None:
            return None
        begin, self._told = self._told, self._told + count
        ids, entries = output.token_ids[begin : self._told], output.logprobs[begin : self._told]
        return self._table(ids, entries, None if self._text is None else self._text.push)

    def _table(
        self,
        ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        text: Callable[[int], str] | None,
    ) -> dict[str, Any]:
        """text: what an id adds to the text that the offsets count."""
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for id, entry in zip(ids, entries):
            out["tokens"].append(legacy(self._tokenizer, id))
            out["token_logprobs"].append(None if entry is None else finite(entry[id].logprob))
            out["top_logprobs"].append(None if entry is None else self._best(id, entry))
            out["text_offset"].append(self._offset)
            if text is not None:
                self._offset += len(text(id))
        return out

    def _best(self, id: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """The most likely ones and the one that was taken. Where two read alike the likelier stands."""
        best: dict[str, float] = {}
        for other, value in [*list(entry.items())[: self._top], (id, entry[id])]:
            best.setdefault(legacy(self._tokenizer, other), finite(value.logprob))
        return best


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Older-shape tables, one after another."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


def token_bytes(tokenizer: Tokenizer | None, id: int) -> bytes:
    """A token's bytes; of an ids-only engine the id in digits."""
    return str(id).encode() if tokenizer is None else tokenizer.token_bytes(id)


def legacy(tokenizer: Tokenizer | None, id: int) -> str:
    """A token as the older shape writes it: text, or its bytes where it is a part of a character."""
    data = token_bytes(tokenizer, id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(value: float) -> float:
    """``value``, or the least that JSON is given."""
    return max(value, LEAST)

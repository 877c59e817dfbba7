"""The output of a response as it grows: items (messages, calls), and the typed events that tell of
them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

ResponseEvent = dict[str, Any]


class ResponseItems:
    """Takes text and calls in order. ``output`` holds what is complete; events come without their
    number.

    hold_spaces: whether spaces are held back until something else follows, since they may stand
    before a call.
    """

    def __init__(self, hold_spaces: bool) -> None:
        self.output: list[dict[str, Any]] = []
        self._hold_spaces = hold_spaces
        self._held_spaces = ""
        # the message that is open, by its id, or the call
        self._id = ""
        self._call: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        # what the model wrote and is not said yet, with what is to be told of its tokens
        self._pending_logprobs: list[tuple[str, list[Any]]] = []

    def record_tokens(self, text: str, logprobs: Sequence[Any]) -> None:
        """What the model wrote, before it is told what of it is said; logprobs: of the tokens that
        completed it.
        """
        if self._pending_logprobs and not self._pending_logprobs[-1][0]:
            # tokens whose text comes with a later one
            logprobs = [*self._pending_logprobs.pop()[1], *logprobs]
        self._pending_logprobs.append((text, [*logprobs]))

    def add_text(self, text: str) -> Iterator[ResponseEvent]:
        """More text."""
        text = self._held_spaces + text
        self._held_spaces = ""
        if not self._id and self._hold_spaces and not text.strip():
            self._held_spaces = text
            return
        if not text:
            return
        yield from self._close("completed", call_only=True)
        yield from self._open()
        told = self._take_logprobs(text)
        self._texts.append(text)
        self._logprobs += told
        yield {
            "type": "response.output_text.delta",
            **self._content_position(),
            "delta": text,
            "logprobs": told,
        }

    def start_call(self, id: str, name: str) -> Iterator[ResponseEvent]:
        """A call begins; what was open ends. Spaces before it are no message."""
        self._pending_logprobs = self._pending_logprobs[
            -1:
        ]  # text may stand behind the call's end, in one piece with it
        yield from self._close("completed")
        self._held_spaces = ""
        self._call = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(16)}",
            "call_id": id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output),
            "item": self._call,
        }

    def add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        """More of the call's arguments."""
        assert self._call is not None, "arguments belong to a call"
        self._pending_logprobs = self._pending_logprobs[-1:]
        if text:
            self._texts.append(text)
            place = {"item_id": self._call["id"], "output_index": len(self.output)}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """Nothing more comes: status of what is open. There is at least one item then."""
        if not (self.output or self._id or self._call):
            yield from self._open()
            if self._held_spaces:
                yield from self.add_text("")
        if self._id and not any(item["type"] == "function_call" for item in self.output):
            # of tokens that have no text
            self._logprobs += [one for _, each in self._pending_logprobs for one in each]
        yield from self._close(status)

    def _take_logprobs(self, text: str) -> list[Any]:
        """What is to be told of the tokens that ``text`` consists of; those before it belong to a
        call.
        """
        heard = "".join(each for each, _ in self._pending_logprobs)
        begin, end = _locate_text(text, heard)
        place = 0
        told, left = list[Any](), list[tuple[str, list[Any]]]()
        for piece, logprobs in self._pending_logprobs:
            first, place = place, place + len(piece)
            mine = first < end and place > begin
            if mine:
                told += logprobs
            if place > end or not piece:
                left.append((piece[max(end - first, 0) :], [] if mine else logprobs))
        self._pending_logprobs = left
        return told

    def _open(self) -> Iterator[ResponseEvent]:
        if self._id:
            return
        self._id = f"msg_{secrets.token_hex(16)}"
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output),
            "item": self._message("in_progress", []),
        }
        yield {
            "type": "response.content_part.added",
            **self._content_position(),
            "part": _output_text_part("", []),
        }

    def _close(self, status: str, *, call_only: bool = False) -> Iterator[ResponseEvent]:
        """End what is open; the message goes on where only a call is to end."""
        if self._call is not None:
            yield from self._close_call(status)
        elif self._id and not call_only:
            yield from self._close_message(status)

    def _close_call(self, status: str) -> Iterator[ResponseEvent]:
        assert self._call is not None
        item = {**self._call, "arguments": "".join(self._texts), "status": status}
        index = {"output_index": len(self.output)}
        done = {
            "item_id": item["id"],
            **index,
            "name": item["name"],
            "arguments": item["arguments"],
        }
        yield {"type": "response.function_call_arguments.done", **done}
        yield {"type": "response.output_item.done", **index, "item": item}
        self.output.append(item)
        self._call, self._texts = None, []

    def _close_message(self, status: str) -> Iterator[ResponseEvent]:
        text, logprobs = "".join(self._texts), self._logprobs
        part, where = _output_text_part(text, logprobs), self._content_position()
        yield {"type": "response.output_text.done", **where, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **where, "part": part}
        item = self._message(status, [part])
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._id, self._texts, self._logprobs = "", [], []

    def _content_position(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.output), "content_index": 0}

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _locate_text(text: str, written: str) -> tuple[int, int]:
    """Where ``text`` stands, the last time, in what was heard; spaces at its head may be from
    before a call.
    """
    if written.startswith(text):
        return 0, len(text)
    kept = text.lstrip()
    begin = written.rfind(kept)
    if begin < 0:
        return 0, len(written)
    end, blank = begin + len(kept), len(text) - len(kept)
    while blank and written[begin - 1 : begin].isspace():
        begin, blank = begin - 1, blank - 1
    return begin, end


def _output_text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

"""The output of a response as it grows: items (messages, calls) and typed events of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelmill.serve.custom_tools import parse_custom_input
from modelmill.serve.encrypted_content_codec import compress_text
from modelmill.serve.response_tools import ClientToolName
from modelmill.serve.tool_call_progress import is_json

ResponseEvent = dict[str, Any]
FUNCTION_CALL_ITEM = ("function_call", "fc", "arguments")
CUSTOM_CALL_ITEM = ("custom_tool_call", "ctc", "input")
"""Type of an item, beginning of its id, and the field of what the model wrote."""


class ResponseItemsBuilder:
    """Collects text and calls in order; ``output`` has the complete items.

    Events have no number yet. With ``hold_spaces``, leading spaces are held until other text
    follows, since they may precede a call. ``client_names_by_offered_name``: what the client
    calls the tools, by the names that the model writes. ``adds_encrypted_reasoning``: thinking has
    ``encrypted_content``, too.
    """

    def __init__(
        self,
        hold_spaces: bool,
        client_names_by_offered_name: Mapping[str, ClientToolName] | None = None,
        adds_encrypted_reasoning: bool = False,
    ) -> None:
        self.output: list[dict[str, Any]] = []
        self._adds_encrypted_reasoning = adds_encrypted_reasoning
        self._tools_by_offered_name = client_names_by_offered_name or {}
        self._hold_spaces = hold_spaces
        self._held_spaces = ""
        # id of the open message, or the open call
        self._id = ""
        self._call: dict[str, Any] | None = None
        self._reasoning_id = ""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        # generated text that has not been assigned to an item yet, with its logprobs
        self._pending_logprobs: list[tuple[str, list[Any]]] = []

    def record_logprobs(self, text: str, logprobs: Sequence[Any]) -> None:
        """Add generated text, before it is split into items, and the logprobs of its tokens."""
        if self._pending_logprobs and not self._pending_logprobs[-1][0]:
            # tokens whose text is completed by a later one
            logprobs = [*self._pending_logprobs.pop()[1], *logprobs]
        self._pending_logprobs.append((text, [*logprobs]))

    def add_text(self, text: str) -> Iterator[ResponseEvent]:
        """Add text to the message."""
        text = self._held_spaces + text
        self._held_spaces = ""
        if not self._id and self._hold_spaces and not text.strip():
            self._held_spaces = text
            return
        if not text:
            return
        yield from self._close_item("completed", call_only=True)
        yield from self._open_message()
        logprobs = self._take_logprobs(text)
        self._texts.append(text)
        self._logprobs += logprobs
        yield {
            "type": "response.output_text.delta",
            **self._content_event_fields(),
            "delta": text,
            "logprobs": logprobs,
        }

    def add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        """Add to the reasoning, an item of its own."""
        self._pending_logprobs = self._pending_logprobs[-1:]
        if not self._reasoning_id:
            yield from self._close_item("completed")
            self._reasoning_id = f"rs_{secrets.token_hex(16)}"
            item = self._reasoning_item("in_progress", [])
            yield {**self._output_index_and_item(item), "type": "response.output_item.added"}
            part = {"type": "reasoning_text", "text": ""}
            yield {
                "type": "response.content_part.added",
                **self._reasoning_event_fields(),
                "part": part,
            }
        self._texts.append(text)
        yield {
            "type": "response.reasoning_text.delta",
            **self._reasoning_event_fields(),
            "delta": text,
        }

    def start_call(self, id: str, name: str) -> Iterator[ResponseEvent]:
        """Begin a call and end the open item; spaces before it are dropped."""
        self._pending_logprobs = self._pending_logprobs[
            -1:
        ]  # text after the end of the call may be in the same entry
        yield from self._close_item("completed")
        self._held_spaces = ""
        tool = self._tools_by_offered_name.get(name) or ClientToolName(name)
        item_type, prefix, field = CUSTOM_CALL_ITEM if tool.is_custom else FUNCTION_CALL_ITEM
        self._call = {
            "type": item_type,
            "id": f"{prefix}_{secrets.token_hex(16)}",
            "call_id": id,
            **tool.name_fields(),
            field: "",
            "status": "in_progress",
        }
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output),
            "item": self._call,
        }

    def add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        """Add to the arguments of the call."""
        assert self._call is not None, "arguments belong to a call"
        self._pending_logprobs = self._pending_logprobs[-1:]
        if text:
            self._texts.append(text)
        if text and self._call["type"] == FUNCTION_CALL_ITEM[0]:
            position = {"item_id": self._call["id"], "output_index": len(self.output)}
            yield {"type": "response.function_call_arguments.delta", **position, "delta": text}

    def finish_items(self, status: str) -> Iterator[ResponseEvent]:
        """End the open item with ``status``; there is at least one item afterwards."""
        if not (self.output or self._id or self._call or self._reasoning_id):
            yield from self._open_message()
            if self._held_spaces:
                yield from self.add_text("")
        calls = (FUNCTION_CALL_ITEM[0], CUSTOM_CALL_ITEM[0])
        if self._id and not any(item["type"] in calls for item in self.output):
            # logprobs of tokens without text
            self._logprobs += [one for _, each in self._pending_logprobs for one in each]
        yield from self._close_item(status)

    def _take_logprobs(self, text: str) -> list[Any]:
        """Remove and return the logprobs of ``text``; those before it belong to a call."""
        pending = "".join(each for each, _ in self._pending_logprobs)
        begin, end = _find_generated_char_span(text, pending)
        position = 0
        taken_logprobs, remaining = list[Any](), list[tuple[str, list[Any]]]()
        for piece, logprobs in self._pending_logprobs:
            first, position = position, position + len(piece)
            overlaps = first < end and position > begin
            if overlaps:
                taken_logprobs += logprobs
            if position > end or not piece:
                remaining.append((piece[max(end - first, 0) :], [] if overlaps else logprobs))
        self._pending_logprobs = remaining
        return taken_logprobs

    def _open_message(self) -> Iterator[ResponseEvent]:
        if self._id:
            return
        self._id = f"msg_{secrets.token_hex(16)}"
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output),
            "item": self._message_item("in_progress", []),
        }
        yield {
            "type": "response.content_part.added",
            **self._content_event_fields(),
            "part": _output_text_part("", []),
        }

    def _close_item(self, status: str, *, call_only: bool = False) -> Iterator[ResponseEvent]:
        """End the open item; with ``call_only`` an open message continues."""
        if self._reasoning_id:
            yield from self._close_reasoning(status)
        elif self._call is not None:
            yield from self._close_call(status)
        elif self._id and not call_only:
            yield from self._close_message(status)

    def _close_call(self, status: str) -> Iterator[ResponseEvent]:
        assert self._call is not None
        text, index = "".join(self._texts), {"output_index": len(self.output)}
        if not is_json(text):
            status = "incomplete"  # a stop string cut it off
        position = {"item_id": self._call["id"], **index}
        if self._call["type"] == FUNCTION_CALL_ITEM[0]:
            item = {**self._call, "arguments": text, "status": status}
            done = {**position, "name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **done}
        else:
            # its characters are escaped in the JSON that the model writes: it follows as a whole
            text = parse_custom_input(text)
            item = {**self._call, "input": text, "status": status}
            yield {"type": "response.custom_tool_call_input.delta", **position, "delta": text}
            yield {"type": "response.custom_tool_call_input.done", **position, "input": text}
        yield {"type": "response.output_item.done", **index, "item": item}
        self.output.append(item)
        self._call, self._texts = None, []

    def _close_reasoning(self, status: str) -> Iterator[ResponseEvent]:
        text = "".join(self._texts)
        part, position = {"type": "reasoning_text", "text": text}, self._reasoning_event_fields()
        yield {"type": "response.reasoning_text.done", **position, "text": text}
        yield {"type": "response.content_part.done", **position, "part": part}
        item = self._reasoning_item(status, [part])
        if self._adds_encrypted_reasoning:
            item["encrypted_content"] = compress_text(text)
        yield {**self._output_index_and_item(item), "type": "response.output_item.done"}
        self.output.append(item)
        self._reasoning_id, self._texts = "", []

    def _reasoning_item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": self._reasoning_id,
            "summary": [],
            "content": content,
            "status": status,
        }

    def _reasoning_event_fields(self) -> dict[str, Any]:
        return {
            "item_id": self._reasoning_id,
            "output_index": len(self.output),
            "content_index": 0,
        }

    def _output_index_and_item(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": len(self.output), "item": item}

    def _close_message(self, status: str) -> Iterator[ResponseEvent]:
        text, logprobs = "".join(self._texts), self._logprobs
        part, position = _output_text_part(text, logprobs), self._content_event_fields()
        yield {"type": "response.output_text.done", **position, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **position, "part": part}
        item = self._message_item(status, [part])
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._id = ""
        self._texts = []
        self._logprobs = []

    def _content_event_fields(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.output), "content_index": 0}

    def _message_item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _find_generated_char_span(text: str, written: str) -> tuple[int, int]:
    """Find the last position of ``text`` in what was generated.

    Spaces at its start may come from before a call.
    """
    if written.startswith(text):
        return 0, len(text)
    stripped = text.lstrip()
    begin = written.rfind(stripped)
    if begin < 0:
        return 0, len(written)
    end, blank = begin + len(stripped), len(text) - len(stripped)
    while blank and written[begin - 1 : begin].isspace():
        begin, blank = begin - 1, blank - 1
    return begin, end


def _output_text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

"""The calls of one choice so far, and what they make of its finish reason."""

from __future__ import annotations

import json

from modelmill.outputs import CompletionOutput
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.text.answer_pieces import ToolCallDelta
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text_processor import TextProcessor


class ToolCallProgress:
    """Counts the calls, and keeps the arguments of the last one."""

    def __init__(self, chat: ChatRequest, text_processor: TextProcessor) -> None:
        self._constrains_call = chat.forces_tool_call or chat.schema_scope == "content"
        chat_format = text_processor.chat_format
        # the stop strings of the tool format follow a complete call
        complete = (
            () if chat_format is None else load_chat_syntax(chat_format.format_name).calls.stops
        )
        self._truncating_stops = stop_strings(chat).difference(complete)
        self._num_calls = 0
        self._arguments = ""

    def add_delta(self, call: ToolCallDelta) -> None:
        """Take the next delta of a call."""
        begins = call.name is not None
        self._num_calls += begins
        self._arguments = ("" if begins else self._arguments) + call.arguments

    def finish_reason(self, output: CompletionOutput, reason: str | None) -> str | None:
        """The reason as OpenAI names it: stop, length or tool_calls; None before the end."""
        finish_reason = openai_finish_reason(reason)
        if finish_reason != "stop" or not self._num_calls:
            return finish_reason
        # a stop string of the request, or a grammar without a next token, may end a call in its
        # middle; it does not count as a call then
        ended = output.stop_reason in self._truncating_stops or self._constrains_call
        return "stop" if ended and not is_json(self._arguments) else "tool_calls"


def stop_strings(chat: ChatRequest) -> frozenset[str]:
    """The stop strings of the request."""
    return frozenset([chat.stop] if isinstance(chat.stop, str) else chat.stop or ())


def is_json(text: str) -> bool:
    """Whether a text is valid JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

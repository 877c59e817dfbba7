"""Answers of llama.cpp's own completion routes, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelmill.serve.chat_answer import exhaust
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.openai_format import sse_event
from modelmill.serve.request_handle import RequestHandle, StreamItem
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.serve.stream import EventFormatter
from modelmill.serve.timings import request_timings

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class LlamaCppAnswerBuilder(EventFormatter):
    """Builds the answer, whole or as events."""

    def __init__(self, model: str, body: CompletionRequest, handle: RequestHandle) -> None:
        self._model, self._body, self._handle = model, body, handle
        self._finish_reason: str | None = None

    def consume(self, items: Sequence[StreamItem]) -> None:
        """Add deltas without making events."""
        exhaust(map(self._record_finish_reason, items))

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        output = self._handle.request_states[0].output.outputs[0]
        return {
            **self._final_fields(),
            "content": output.text,
            "tokens": self._returned_token_ids(output.token_ids),
        }

    def first_events(self) -> bytes:
        """Nothing: events begin with text."""
        return b""

    def delta_events(self, items: Sequence[StreamItem]) -> bytes:
        """An event for each delta with text."""
        events = []
        for item in items:
            self._record_finish_reason(item)
            if item.delta.text:
                tokens = self._returned_token_ids(item.delta.token_ids)
                fields = {"index": 0, "content": item.delta.text, "tokens": tokens, "stop": False}
                events.append(sse_event(fields))
        return b"".join(events)

    def terminal_events(self) -> bytes:
        """The last event, with counts and times."""
        return sse_event({**self._final_fields(), "content": "", "tokens": []})

    def _record_finish_reason(self, item: StreamItem) -> None:
        self._finish_reason = openai_finish_reason(item.delta.finish_reason)

    def _returned_token_ids(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._body.return_token_ids else []

    def _final_fields(self) -> dict[str, Any]:
        state = self._handle.request_states[0]
        output = state.output.outputs[0]
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        stop_type = "word" if word else _STOP_TYPES.get(self._finish_reason or "", "none")
        fields: dict[str, Any] = {
            "index": 0,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(state.output.prompt_token_ids),
            "tokens_cached": state.output.cached_tokens,
            "has_new_line": "\n" in output.text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": request_timings([state]),
        }
        return {**fields, **({"warnings": self._body.warnings} if self._body.warnings else {})}

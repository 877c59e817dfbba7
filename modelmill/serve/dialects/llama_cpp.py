"""llama.cpp's own completion routes: requests, and answers whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.serve.chat_answer import exhaust
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.generation_schema import GenerationFields
from modelmill.serve.openai_format import sse_event
from modelmill.serve.peer_fields import AnyItems, ignored
from modelmill.serve.prompt_fields import TokenIds
from modelmill.serve.request_handle import RequestHandle, StreamItem
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.serve.stream import EventFormatter
from modelmill.serve.strict_models import FAIL_FAST, JsonObjectList, StrictModel
from modelmill.serve.timings import request_timings

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class NativeFields(GenerationFields):
    """Fields of /completion and /infill; without a model, the first one answers."""

    model: str | None = Field(None, max_length=1024)  # type: ignore[assignment]
    samplers: AnyItems | str | None = ignored("the order is fixed: penalties, temperature, filters")
    response_fields: AnyItems | None = ignored("the whole object is returned")
    t_max_prompt_ms: int | None = ignored("a prompt is always read whole")
    t_max_predict_ms: int | None = ignored("n_predict limits the text")
    n_indent: int | None = ignored("indentation is the model's")

    def make_completion(self, prompt: Any, **fields: Any) -> CompletionRequest:
        """Make the completion request with this prompt."""
        shared = {
            name: getattr(self, name)
            for name in GenerationFields.model_fields
            if name in self.model_fields_set and name != "model"
        }
        shared["grammar"] = shared.pop("grammar_", None)
        set_fields = {name: value for name, value in shared.items() if value is not None}
        return CompletionRequest.model_validate(
            {"model": self.model or "", "prompt": prompt, "n_predict": -1, **set_fields, **fields}
        )

    def check(self) -> None:
        """Raise RequestError for what these routes do not return."""
        if (self.n or 1) > 1:
            raise RequestError("n is not supported here; use /v1/completions")
        self.check_stream()


class NativeCompletionRequest(NativeFields):
    """Request body of POST /completion."""

    prompt: str | TokenIds
    parse_special: bool | None = Field(None, description="false: control tokens are plain text")

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request; control tokens are parsed by default."""
        special = self.parse_special is not False and isinstance(self.prompt, str)
        return self.make_completion(self.prompt, parse_special=special or None)


class InfillContext(StrictModel):
    """A further file that the model reads first."""

    text: str
    filename: str | None = None


class InfillRequest(NativeFields):
    """Request body of POST /infill: the text between a prefix and a suffix."""

    input_prefix: str
    input_suffix: str
    input_extra: JsonObjectList | None = None
    prompt: str | None = Field(None, description="text that follows the prefix")
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(None, max_length=4096)

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request with a suffix."""
        extra = [InfillContext.model_validate(each) for each in self.input_extra or ()]
        head = "".join(
            f"{each.filename}\n{each.text}\n\n" if each.filename else f"{each.text}\n\n"
            for each in extra
        )
        prefix = head + self.input_prefix + (self.prompt or "")
        return self.make_completion(prefix, suffix=self.input_suffix)


class NativeAnswer(EventFormatter):
    """Builds the answer, whole or as events."""

    def __init__(self, model: str, body: CompletionRequest, handle: RequestHandle) -> None:
        self._model, self._body, self._handle = model, body, handle
        self._finish_reason: str | None = None

    def consume(self, items: Sequence[StreamItem]) -> None:
        """Add deltas without making events."""
        exhaust(map(self._read, items))

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        output = self._handle.request_states[0].output.outputs[0]
        return {**self._end(), "content": output.text, "tokens": self._tokens(output.token_ids)}

    def first_events(self) -> bytes:
        """Nothing: events begin with text."""
        return b""

    def delta_events(self, items: Sequence[StreamItem]) -> bytes:
        """An event for each delta with text."""
        events = []
        for item in items:
            self._read(item)
            if item.delta.text:
                tokens = self._tokens(item.delta.token_ids)
                fields = {"index": 0, "content": item.delta.text, "tokens": tokens, "stop": False}
                events.append(sse_event(fields))
        return b"".join(events)

    def terminal_events(self) -> bytes:
        """The last event, with counts and times."""
        return sse_event({**self._end(), "content": "", "tokens": []})

    def _read(self, item: StreamItem) -> None:
        self._finish_reason = openai_finish_reason(item.delta.finish_reason)

    def _tokens(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._body.return_token_ids else []

    def _end(self) -> dict[str, Any]:
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

"""Answers of llama.cpp's own completion routes, whole or as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.types import Logprob
from modelmill.outputs import CompletionOutput
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.error_format import llama_cpp_error
from modelmill.serve.dialects.llama_cpp_settings import generation_settings, select_fields
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.errors import ApiError
from modelmill.serve.openai_format import clamp_logprob, sse_event, token_bytes
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.serve.stream import EventFormatter
from modelmill.serve.timings import request_timings

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class LlamaCppAnswerBuilder(EventFormatter):
    """Builds the answer, whole or as events; of several prompts a list, or events by index."""

    def __init__(
        self,
        model: str,
        body: CompletionRequest,
        handle: HttpRequestHandle,
        engine: EngineClient,
        response_fields: Sequence[str] | None = None,
    ) -> None:
        """Make the builder of a request's answers.

        Args:
            model: as the request names it.
            body: the completion request.
            handle: of its requests.
            engine: that answers.
            response_fields: paths of the fields to return; all of them without.
        """
        self._model, self._body, self._handle = model, body, handle
        self._tokenizer = engine.text_processor.tokenizer
        self._defaults = engine.text_processor.generation_defaults.to_dict()["values"]
        self._max_len = engine.request_limits.max_len
        self._response_fields = response_fields
        self._num_formatted = [0] * len(handle.request_states)

    def add_stream_items(self, items: Sequence[PromptOutputDelta]) -> None:
        """Take deltas without making events: the whole answer is in the request's state."""

    def error_events(self, error: ApiError) -> bytes:
        """The error, in place of the rest."""
        return sse_event(llama_cpp_error(error))

    def response(self) -> Any:
        """The whole answer."""
        answers = [self._whole_answer(index) for index in range(len(self._handle.request_states))]
        return answers[0] if len(answers) == 1 else answers

    def _whole_answer(self, index: int) -> dict[str, Any]:
        output = self._output(index)
        ids = output.token_ids if self._body.return_token_ids else []
        # the stop token is not part of the text
        count = len(output.token_ids) - isinstance(output.stop_reason, int)
        answer = {
            **self._final_fields(index),
            "content": output.text,
            "tokens": list(ids),
            **self._next_probabilities(index, count),
        }
        return self._selected(index, answer)

    def first_events(self) -> bytes:
        """Nothing: events begin with text."""
        return b""

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """An event for each delta with text, and the last one of each prompt."""
        return b"".join(map(self._delta_event, items))

    def _delta_event(self, item: PromptOutputDelta) -> bytes:
        index, delta = item
        events = b""
        probabilities = self._next_probabilities(index, len(delta.token_ids))
        if delta.text or probabilities.get("completion_probabilities"):
            ids = list(delta.token_ids)
            fields = {"index": index, "content": delta.text, "tokens": ids, "stop": False}
            events += sse_event({**fields, **probabilities})
        if delta.finish_reason is not None:
            # with the counts and times
            last = {**self._final_fields(index), "content": "", "tokens": []}
            events += sse_event(self._selected(index, last))
        return events

    def _selected(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields of an answer that the request chooses; the prompt only if it does."""
        if not self._response_fields:
            return answer
        if "prompt" in self._response_fields and self._tokenizer is not None:
            ids = self._handle.request_states[index].output.prompt_token_ids
            answer["prompt"] = self._tokenizer.decode(ids, skip_special=False)
        return select_fields(answer, self._response_fields)

    def terminal_events(self) -> bytes:
        """Nothing: each prompt has had its last event."""
        return b""

    def _output(self, index: int) -> CompletionOutput:
        return self._handle.request_states[index].output.outputs[0]

    def _next_probabilities(self, index: int, count: int) -> dict[str, Any]:
        """The field of the next tokens' probabilities; none unless the request asks for it."""
        output, begin = self._output(index), self._num_formatted[index]
        if output.logprobs is None:
            return {}
        end = self._num_formatted[index] = begin + count
        pairs = zip(output.token_ids[begin:end], output.logprobs[begin:end])
        return {"completion_probabilities": [self._format_token(*pair) for pair in pairs]}

    def _format_token(self, id: int, entries: Mapping[int, Logprob]) -> dict[str, Any]:
        top = list(entries.items())[: self._body.logprobs or 0]
        return {
            **self._format_logprob_entry(id, entries[id]),
            "top_logprobs": [self._format_logprob_entry(other, value) for other, value in top],
        }

    def _format_logprob_entry(self, id: int, value: Logprob) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, id)
        return {
            "id": id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": clamp_logprob(value.logprob),
        }

    def _final_fields(self, index: int) -> dict[str, Any]:
        state, output = self._handle.request_states[index], self._output(index)
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        reason = openai_finish_reason(output.finish_reason)
        num_tokens = len(state.output.prompt_token_ids) + len(output.token_ids)
        fields: dict[str, Any] = {
            "index": index,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(state.output.prompt_token_ids),
            "tokens_cached": state.output.cached_tokens,
            "has_new_line": "\n" in output.text,
            "truncated": reason == "length" and num_tokens >= self._max_len,
            "stop_type": "word" if word else _STOP_TYPES.get(reason or "", "none"),
            "stopping_word": word,
            "generation_settings": generation_settings(
                state.request.params, self._defaults, stream=bool(self._body.stream)
            ),
            "timings": request_timings([state]),
        }
        return {**fields, **({"warnings": self._body.warnings} if self._body.warnings else {})}

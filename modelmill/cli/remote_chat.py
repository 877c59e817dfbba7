"""A chat with an engine behind an OpenAI API, for ``modelmill chat --url``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from modelmill.cli.chat_model import ChatDelta, ChatSettings
from modelmill.core.errors import ModelmillError
from modelmill.core.generation_defaults import MODELMILL_SOURCE
from modelmill.core.types import SamplingParams
from modelmill.eval.openai_client import OpenAIClient
from modelmill.outputs import CompletionOutput, RequestOutput
from modelmill.text.answer_pieces import AnswerPiece, ReasoningDelta, ToolCallDelta

API_PARAM_NAMES = {"include_stop": "include_stop_str_in_output"}
UNSENT_PARAMS = (
    "n",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "logprobs",
    "prompt_logprobs",
    "logits_processors",
)


class RemoteChatModel:
    """A server with OpenAI's API; without a ``model`` the first one that it lists is used."""

    def __init__(self, remote: OpenAIClient, model: str | None = None) -> None:
        self._client = remote
        self._loop = asyncio.new_event_loop()
        self.model = model or self._loop.run_until_complete(remote.first_text_model_id())
        self._sampling_by_model: dict[str, dict[str, Any]] = {}

    def stream(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, settings: ChatSettings
    ) -> Iterator[ChatDelta]:
        """Yield the deltas of one answer; closing the iterator aborts the request.

        Raises:
            ModelmillError: if the server cannot be reached or rejects the request.
        """
        fields = explicit_sampling_fields(params)
        body = {"model": self.model, "messages": list(messages), **fields}
        suggested = self.suggested_sampling()
        if not suggested.keys() & fields.keys():
            body |= suggested
        body |= tool_and_thinking_fields(settings)
        events = self._client.stream(
            "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        output = CompletionOutput(0)
        answer = RequestOutput("", None, [], [output])
        began, sizes = time.perf_counter(), list[int]()
        try:
            while (received := self._loop.run_until_complete(anext(events, None))) is not None:
                when, event = received
                usage = event.get("usage") or {}
                # only the number of tokens is known, not their ids
                output.token_ids = [0] * usage.get("completion_tokens", len(output.token_ids))
                answer.prompt_token_ids = [0] * usage.get(
                    "prompt_tokens", len(answer.prompt_token_ids)
                )
                for choice in event.get("choices") or ():
                    pieces = parse_delta_pieces(choice.get("delta") or {})
                    if pieces:
                        sizes.append(sum(map(_count_piece_characters, pieces)))
                        answer.first_token_seconds = answer.first_token_seconds or when - began
                    output.text += "".join(each for each in pieces if isinstance(each, str))
                    output.finish_reason = choice.get("finish_reason") or output.finish_reason
                    yield ChatDelta(pieces, answer)
            answer.seconds = time.perf_counter() - began
            if sizes and 2 * sizes[0] > sum(sizes):
                # a server may hold text back: most of it came at once, long after the first token
                answer.first_token_seconds = None
        finally:
            self._loop.run_until_complete(events.aclose())  # type: ignore[attr-defined]

    def models(self) -> list[str]:
        """Return the names of the server's text generation models. Raises ModelmillError."""
        return self._loop.run_until_complete(self._client.text_model_ids())

    def suggested_sampling(self) -> dict[str, Any]:
        """Return the sampling that the server suggests to people for the model.

        Empty if the checkpoint has defaults of its own, which the server applies, and for a server
        that suggests nothing. API clients that set nothing get OpenAI's defaults instead.
        """
        if self.model not in self._sampling_by_model:
            try:
                cards = self._loop.run_until_complete(self._client.text_model_cards())
            except ModelmillError:  # the request itself says what is wrong
                return {}
            card = next((card for card in cards if card["id"] == self.model), {})
            if card.get("suggested_sampling") is None:  # nothing, or not before it is loaded
                return {}
            self._sampling_by_model[self.model] = _parse_suggested_sampling(
                card["suggested_sampling"]
            )
        return self._sampling_by_model[self.model]

    def choose_model(self, name: str) -> None:
        """Use another model from now on."""
        self.model = name

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


def _parse_suggested_sampling(suggested: Any) -> dict[str, Any]:
    if not isinstance(suggested, dict) or suggested.get("source") != MODELMILL_SOURCE:
        return {}
    return dict(suggested.get("values") or {})


def tool_and_thinking_fields(settings: ChatSettings) -> dict[str, Any]:
    """Return the set settings under the API's names."""
    fields: dict[str, Any] = {}
    if settings.tools:
        fields["tools"] = list(settings.tools)
    if settings.thinks is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": settings.thinks}
    if settings.thinking_budget is not None:
        fields["thinking_token_budget"] = settings.thinking_budget
    return fields


def parse_delta_pieces(delta: Mapping[str, Any]) -> list[AnswerPiece]:
    """Return the thinking, the text and the parts of calls of a streamed delta."""
    pieces: list[AnswerPiece] = []
    thinking = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thinking, str) and thinking:
        pieces.append(ReasoningDelta(thinking))
    if delta.get("content"):
        pieces.append(str(delta["content"]))
    for place, call in enumerate(delta.get("tool_calls") or ()):
        function = call.get("function") or {}
        pieces.append(
            ToolCallDelta(
                call.get("index", place),
                function.get("arguments") or "",
                call.get("id"),
                function.get("name"),
            )
        )
    return pieces


def _count_piece_characters(piece: AnswerPiece) -> int:
    """Characters of a piece, whatever it is a part of."""
    if isinstance(piece, str):
        return len(piece)
    return len(piece.text if isinstance(piece, ReasoningDelta) else piece.arguments)


def explicit_sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the set fields of ``params`` under the API's names."""
    neutral = SamplingParams()
    out: dict[str, Any] = {}
    for each in fields(SamplingParams):
        value = getattr(params, each.name)
        if each.name in UNSENT_PARAMS or value == getattr(neutral, each.name):
            continue
        if each.name == "logit_bias":
            value = {str(id): bias for id, bias in value.items()}
        out[API_PARAM_NAMES.get(each.name, each.name)] = (
            list(value) if isinstance(value, tuple) else value
        )
    return out

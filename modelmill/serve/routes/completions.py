"""POST /v1/completions: continue a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.outputs import CompletionOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.sequence import RequestLimits, check_request_and_get_ids
from modelmill.serve import openai_format
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.engine_client import EngineClient, max_tokenize_tokens
from modelmill.serve.generation_schema import MAX_TOP_LOGPROBS
from modelmill.serve.gil_yielding_json_serializer import dump_json
from modelmill.serve.mixed_prompts import MixedPrompt, encode_mixed_prompt, has_text
from modelmill.serve.openai_format import TextLogprobsFormatter
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.request_options import (
    cache_salt_or_random,
    format_prompt_logprobs,
    prompt_truncation,
    sampling_params_with_bad_words,
)
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    openai_finish_reason,
    prefixing_errors_with_prompt_name,
    prepare_and_submit_requests,
    random_id,
)
from modelmill.serve.special_token_prompts import (
    encode_infill_with_fim_tokens,
    encode_text,
    find_special_tokens,
    plain_special_tokens_warning,
)
from modelmill.serve.stream import EventFormatter, EventStream, wait_or_disconnect
from modelmill.serve.timings import request_timings, timing_and_warning_fields
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)
MAX_RESPONSE_PROMPT_LOGPROBS = 1 << 21
"""Limit of prompt log-probabilities in one response, some 50 MB.

A single prompt of up to ``max_model_len`` tokens may exceed it.
"""


class ConvertsToCompletion(Protocol):
    """A request of another API that continues a text."""

    def to_completion_request(self) -> CompletionRequest:
        """Convert to the equivalent completion request."""

    def rename_error_fields(self, text: str) -> str:
        """Rewrite an error about the completion request to name the fields of that API."""


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Any:
    """Continue a text, several texts, or token ids."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body.check()
    engine.check_capacity(len(body.prompts()) * (body.n or 1))
    _, handle = await prepare_and_submit_requests(
        request, engine, completion_request_states, body, engine.request_limits, get_states=list
    )
    builder = CompletionResponseBuilder(body, handle, engine.text_processor)
    if body.stream:
        return EventStream(
            handle,
            builder,
            service.run_in_thread if body.echo and body.logprobs is not None else None,
        )
    await wait_or_disconnect(request, handle)
    return openai_format.SurrogateSafeJsonResponse(
        await service.run_in_thread(builder.full_response)
    )


async def submit_converted_completion(
    request: Request, engine: EngineClient, body: ConvertsToCompletion
) -> tuple[CompletionRequest, HttpRequestHandle]:
    """Queue the completion that a request of another API asks for."""

    def prepare(
        text_processor: TextProcessor, limits: RequestLimits
    ) -> tuple[CompletionRequest, list[RequestOutputState]]:
        try:
            completion = body.to_completion_request()
            completion.check()
            return completion, completion_request_states(text_processor, completion, limits)
        except RequestError as error:
            raise error.reworded(body.rename_error_fields(str(error))) from None

    (completion, _), handle = await prepare_and_submit_requests(
        request, engine, prepare, engine.request_limits, get_states=lambda prepared: prepared[1]
    )
    return completion, handle


def completion_request_states(
    text_processor: TextProcessor, body: CompletionRequest, limits: RequestLimits
) -> list[RequestOutputState]:
    """Convert each prompt to a request.

    Each is checked before the next is tokenized, so an invalid one ends the work on all of them.
    """
    prompts = body.prompts()
    if text_processor.tokenizer is None and (body.stop or any(map(has_text, prompts))):
        raise RequestError(
            "this engine has no tokenizer: give token ids as the prompt, and stop_token_ids"
        )
    params, grammar = (
        sampling_params_with_bad_words(text_processor, body),
        body.relax_and_validate_grammar(),
    )
    states: list[RequestOutputState] = []
    for index, prompt in enumerate(prompts):
        with prefixing_errors_with_prompt_name(f"prompt[{index}]" if len(prompts) > 1 else None):
            encoded, stop_ids = _prompt_and_stop_token_ids(
                text_processor, body, prompt, limits.max_len
            )
            key = "prompt" if isinstance(encoded, str) else "prompt_token_ids"
            ends = tuple(dict.fromkeys((*params.stop_token_ids, *stop_ids)))
            states.append(
                text_processor.request(
                    {key: encoded, "cache_salt": cache_salt_or_random(body)},
                    replace(params, stop_token_ids=ends),
                    grammar=grammar,
                )
            )
            if body.echo:
                states[-1].set_echo_text()
            check_request_and_get_ids(states[-1].request, limits)
        _check_total_prompt_logprobs(states, body, limits.max_len)
    _warn_about_special_tokens(text_processor, body)
    return states


def _prompt_and_stop_token_ids(
    text_processor: TextProcessor,
    body: CompletionRequest,
    prompt: MixedPrompt,
    max_model_len: int,
) -> tuple[str | list[int], tuple[int, ...]]:
    """The prompt as text or ids, and token ids that end the answer beside EOS.

    Raises:
        RequestError: the prompt is too long, or the vocabulary has no tokens for a suffix.
    """
    truncation = prompt_truncation(body, max_model_len)
    longest = max_model_len if truncation is None else max_tokenize_tokens(max_model_len)
    for part in (prompt,) if isinstance(prompt, str) else (prompt, *prompt):
        if not isinstance(part, int):
            text_processor.check_prompt_length(part, longest)  # type: ignore[arg-type]
    tokenizer, ends = text_processor.tokenizer, tuple[int, ...]()
    parses = _parses_special_tokens(text_processor, body)
    encoded: str | list[int] = prompt if isinstance(prompt, str) else []
    if not isinstance(prompt, str):
        encoded = encode_mixed_prompt(
            tokenizer,
            prompt,
            parse_special=parses,
            add_special=body.add_special_tokens is not False,
        )
    elif body.infill_suffix is not None and tokenizer is not None:
        _check_suffix_length(text_processor, body.infill_suffix, max_model_len)
        encoded, marks = encode_infill_with_fim_tokens(tokenizer, prompt, body.infill_suffix)
        ends = marks.ends
    elif parses or body.add_special_tokens is False or truncation is not None:
        encoded = encode_text(
            tokenizer,
            prompt,
            parse_special=parses,
            add_special=body.add_special_tokens is not False,
        )
        if not encoded:
            raise RequestError("prompt has no tokens; give at least one")
    if truncation is not None and not isinstance(encoded, str):
        encoded = truncation.apply(encoded)
    return encoded, ends


def _check_suffix_length(text_processor: TextProcessor, suffix: str, max_model_len: int) -> None:
    """As ``check_prompt_length``, of the suffix."""
    try:
        text_processor.check_prompt_length(suffix, max_model_len)
    except RequestError as error:
        raise error.reworded(str(error).replace("the prompt", "suffix", 1)) from None


def _parses_special_tokens(text_processor: TextProcessor, body: CompletionRequest) -> bool:
    """Whether special tokens in the text become their ids: as requested, or by default."""
    return text_processor.parse_special if body.parse_special is None else body.parse_special


def _warn_about_special_tokens(text_processor: TextProcessor, body: CompletionRequest) -> None:
    """Warn about special tokens that are plain text though the request does not say so."""
    tokenizer = text_processor.tokenizer
    says = body.parse_special is not None or body.infill_suffix is not None
    if says or tokenizer is None or text_processor.parse_special:
        return
    texts = (
        part
        for prompt in body.prompts()
        for part in ((prompt,) if isinstance(prompt, str) else prompt)
        if isinstance(part, str)
    )
    names = [name for text in texts for name in find_special_tokens(tokenizer, text)]
    if names:
        body.add_warnings([plain_special_tokens_warning(list(dict.fromkeys(names)))])


def _check_total_prompt_logprobs(
    request_states: Sequence[RequestOutputState], body: CompletionRequest, max_model_len: int
) -> None:
    """Raise RequestError for prompts with too many log-probabilities for one response."""
    count = body.logprobs if body.echo else body.prompt_logprobs
    if count is None:
        return
    max_logprobs = max(MAX_RESPONSE_PROMPT_LOGPROBS, max_model_len * (MAX_TOP_LOGPROBS + 1))
    if (
        sum(len(each.request.prompt) for each in request_states) * (count + 1) * (body.n or 1)
        > max_logprobs
    ):
        raise RequestError(
            f"prompt needs more than {max_logprobs} log-probabilities in one response; send it in "
            "parts, or request fewer logprobs"
        )


class CompletionResponseBuilder(EventFormatter):
    """Builds the response, whole or as events."""

    def __init__(
        self, body: CompletionRequest, handle: HttpRequestHandle, text_processor: TextProcessor
    ) -> None:
        self._body, self._handle = body, handle
        self._n = body.n or 1
        self._head = {
            "id": random_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": text_processor.system_fingerprint,
        }
        self._tokenizer = text_processor.tokenizer
        self._chunk_template = openai_format.ChunkTemplate(
            self._head, {"usage": None} if body.wants_usage else {}
        )
        count = len(handle.request_states) * self._n
        self._logprobs = [
            TextLogprobsFormatter(
                text_processor.tokenizer,
                body.logprobs or 0,
                continues_prompt=each.continues_prompt,
                skip_special=each.request.params.skip_special_tokens,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
            for each in handle.request_states
            for _ in range(self._n)
        ]
        self._started: set[int] = set()
        self._warned: set[int] = set()
        self._num_sent_ids = [0] * count

    def full_response(self) -> bytes:
        """The whole response as JSON.

        Each choice is serialized before the next is made, because choices may be large.
        """
        choices = b",".join(
            dump_json(self._format_choice(prompt_index, output))
            for prompt_index, each in enumerate(self._handle.request_states)
            for output in each.output.outputs
        )
        head = dump_json({**self._head, "choices": []}).removesuffix(b"]}")
        return b"".join(
            (
                head,
                choices,
                b"],",
                dump_json(
                    {
                        "usage": openai_format.token_usage(self._handle.request_states),
                        **timing_and_warning_fields(self._body, self._handle.request_states),
                    }
                )[1:],
            )
        )

    def _format_event(self, choice: dict[str, Any]) -> bytes:
        """An event, with the progress if the client wants to follow it."""
        body, states = self._body, self._handle.request_states
        fields: dict[str, Any] = {}
        if body.warnings and choice["index"] not in self._warned:
            self._warned.add(choice["index"])
            fields["warnings"] = body.warnings
        if body.wants_running_usage:
            fields["usage"] = openai_format.running_token_usage(states)
        if body.timings_per_token and states[0].is_prompt_computed:
            fields["timings"] = request_timings(states)
        if not fields:
            return self._chunk_template.render_chunk(choice)
        tail = {"usage": None} if body.wants_usage else {}
        return openai_format.sse_event({**self._head, "choices": [choice], **tail, **fields})

    def _format_choice(self, prompt_index: int, output: CompletionOutput) -> dict[str, Any]:
        state, body = self._handle.request_states[prompt_index], self._body
        index = prompt_index * self._n + output.index
        text, tables = output.text, []
        if body.echo:
            text = state.echo_text + text
            if body.logprobs is not None:
                tables.append(self._logprobs[index].format_prompt(state))
        count = (
            len(output.token_ids)
            - isinstance(output.stop_reason, int)
            + self._num_stop_token_logprobs(output)
        )
        logprobs = self._logprobs[index].format_next(output, count)
        if logprobs is not None:
            tables.append(logprobs)
        choice = {
            "index": index,
            "text": text,
            "logprobs": openai_format.concat_logprobs(tables) if tables else None,
            "finish_reason": openai_finish_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
            # null rather than left out, as in vLLM: its clients read them without being asked
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
        if body.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = state.output.prompt_token_ids
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = format_prompt_logprobs(self._tokenizer, state)
        return choice

    def first_events(self) -> bytes:
        """Nothing: choices begin with their text."""
        return b""

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """An event for each delta that has content."""
        return b"".join(self._delta_event(prompt_index, delta) for prompt_index, delta in items)

    def _delta_event(self, prompt_index: int, delta: Any) -> bytes:
        state, body = self._handle.request_states[prompt_index], self._body
        index = prompt_index * self._n + delta.index
        output = state.output.outputs[delta.index]
        text, tables = delta.text, []
        is_first = index not in self._started
        if is_first:
            self._started.add(index)
            if body.echo:
                text = state.echo_text + text
                if body.logprobs is not None:
                    tables.append(self._logprobs[index].format_prompt(state))
        logprobs = self._logprobs[index].format_next(
            output,
            len(delta.token_ids)
            + (self._num_stop_token_logprobs(output) if delta.finish_reason else 0),
        )
        if logprobs is not None and logprobs["tokens"]:
            tables.append(logprobs)
        if not (
            text or tables or delta.finish_reason or (body.return_token_ids and delta.token_ids)
        ):
            return b""
        choice = {
            "index": index,
            "text": text,
            "logprobs": openai_format.concat_logprobs(tables) if tables else None,
            "finish_reason": openai_finish_reason(delta.finish_reason),
            "stop_reason": output.stop_reason if delta.finish_reason else None,
        }
        if body.return_token_ids:
            # the last delta includes the stop token, which has no text
            end = (
                len(output.token_ids)
                if delta.finish_reason
                else self._num_sent_ids[index] + len(delta.token_ids)
            )
            choice["token_ids"], self._num_sent_ids[index] = (
                output.token_ids[self._num_sent_ids[index] : end],
                end,
            )
            if is_first:
                choice["prompt_token_ids"] = state.output.prompt_token_ids
        return self._format_event(choice)

    def _num_stop_token_logprobs(self, output: CompletionOutput) -> int:
        """Number of stop tokens that get log-probabilities although they are not part of the text.

        With ``echo``, used for scoring, clients expect an entry for each sampled token.
        """
        return int(bool(self._body.echo) and isinstance(output.stop_reason, int))

    def terminal_events(self) -> bytes:
        """The usage if requested, and the end of the stream."""
        states = self._handle.request_states
        usage = openai_format.token_usage(states) if self._body.wants_usage else None
        return openai_format.format_stream_end(self._head, usage)

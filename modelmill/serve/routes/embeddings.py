"""POST /v1/embeddings: texts as vectors, from the hidden states that enter the LM head."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.sequence import RequestLimits, check_request_and_get_ids
from modelmill.serve import embeddings_schema
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    prefixing_errors_with_prompt_name,
    prepare_and_submit_requests,
)
from modelmill.serve.stream import wait_or_disconnect
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embeddings(body: embeddings_schema.EmbeddingRequest, request: Request) -> Any:
    """The normed final hidden states of each input, pooled and scaled to length 1."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(len(body.inputs()))
    states, handle = await prepare_and_submit_requests(
        request, engine, embedding_request_states, body, engine.request_limits, get_states=list
    )
    await wait_or_disconnect(request, handle)
    return Response(
        await service.run_in_thread(_response_body, body, states), media_type="application/json"
    )


def embedding_request_states(
    text_processor: TextProcessor,
    body: embeddings_schema.EmbeddingRequest,
    limits: RequestLimits,
    name_input: Callable[[int], str] = "input[{}]".format,
    max_input_tokens: Sequence[int | None] = (),
) -> list[RequestOutputState]:
    """Convert each input to a request.

    Each is checked before the next is tokenized, so an invalid one ends the work on all of them.

    Args:
        text_processor: of the engine.
        body: the HTTP request.
        limits: of the engine.
        name_input: returns the client's field of an input, of several.
        max_input_tokens: how many first tokens of each input are read at most; empty, None: all.

    Raises:
        RequestError: an input is invalid; the message names it.
    """
    inputs = body.inputs()
    if text_processor.tokenizer is None and any(isinstance(each, str) for each in inputs):
        raise RequestError("input must be token ids: this engine has no tokenizer")
    params = SamplingParams(max_tokens=0)
    kept_of_all = body.truncated_input_length(limits.max_len)
    states = []
    for index, each in enumerate(inputs):
        with prefixing_errors_with_prompt_name(name_input(index) if len(inputs) > 1 else None):
            own_limit = max_input_tokens[index] if max_input_tokens else None
            kept = min((n for n in (kept_of_all, own_limit) if n is not None), default=None)
            longest = limits.max_len if kept is None else max_tokenize_tokens(limits.max_len)
            text_processor.check_prompt_length(each, longest)
            key, prompt = "prompt" if isinstance(each, str) else "prompt_token_ids", each
            if kept is not None:
                key, prompt = "prompt_token_ids", _encode_beginning(text_processor, each, kept)
            request = text_processor.request(
                {key: prompt, "cache_salt": body.cache_salt}, params
            ).request
            request = replace(request, pooling=body.pooling_type)
            check_request_and_get_ids(request, limits)
        states.append(RequestOutputState(request, None, None))
    return states


def _encode_beginning(
    text_processor: TextProcessor, prompt: str | list[int], max_tokens: int
) -> list[int]:
    """The first tokens of an input."""
    if not isinstance(prompt, str):
        return prompt[:max_tokens]
    assert text_processor.tokenizer is not None, "texts are refused without one"
    return text_processor.tokenizer.encode_beginning(prompt, max_tokens)


def _response_body(
    body: embeddings_schema.EmbeddingRequest, request_states: list[RequestOutputState]
) -> bytes:
    """The response as JSON, serialized vector by vector.

    One large json.dumps call would hold the GIL and delay other requests.
    """
    packed = body.encoding_format == "base64"
    parts, num_floats = [], 0
    for index, state in enumerate(request_states):
        embedding = state.output.embedding
        assert embedding is not None, "the request has no embedding"
        vector = embeddings_schema.normalize_and_encode_embedding(
            embedding, body.dimensions, packed
        )
        num_floats += len(vector)
        if not packed and num_floats > embeddings_schema.MAX_OUTPUT_FLOATS:
            raise RequestError(
                f"the embeddings have more than {embeddings_schema.MAX_OUTPUT_FLOATS} numbers; use "
                "base64, or send fewer inputs"
            )
        parts.append(
            json.dumps(
                {"object": "embedding", "index": index, "embedding": vector}, separators=(",", ":")
            )
        )
    count = sum(len(state.output.prompt_token_ids) for state in request_states)
    rest = {"model": body.model, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return f'{{"object":"list","data":[{",".join(parts)}],{json.dumps(rest, separators=(",", ":"))[1:]}'.encode()  # noqa: E501

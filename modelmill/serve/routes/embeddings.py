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
from modelmill.serve.discriminated_unions import make_converted_request
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    message_has_images,
    prefixing_errors_with_prompt_name,
    prepare_and_submit_requests,
)
from modelmill.serve.routes.tokenize import encode_prompt
from modelmill.serve.special_token_prompts import encode_text
from modelmill.serve.stream import wait_or_disconnect
from modelmill.serve.tokenize_schema import TokenizeRequest
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embeddings(body: embeddings_schema.EmbeddingRequest, request: Request) -> Any:
    """The normed final hidden states of each input, pooled and scaled to length 1."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body.check_messages()
    engine.check_capacity(1 if body.messages else len(body.inputs()))
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
    kept_of_all = body.truncated_input_length(limits.max_len)
    if body.messages is None:
        inputs = body.inputs()
    else:
        longest = limits.max_len if kept_of_all is None else max_tokenize_tokens(limits.max_len)
        inputs = [_encode_messages(text_processor, body, longest)]
    if text_processor.tokenizer is None and any(isinstance(each, str) for each in inputs):
        raise RequestError("input must be token ids: this engine has no tokenizer")
    params = SamplingParams(max_tokens=0)
    states = []
    for index, each in enumerate(inputs):
        with prefixing_errors_with_prompt_name(name_input(index) if len(inputs) > 1 else None):
            own_limit = max_input_tokens[index] if max_input_tokens else None
            kept = min((n for n in (kept_of_all, own_limit) if n is not None), default=None)
            longest = limits.max_len if kept is None else max_tokenize_tokens(limits.max_len)
            text_processor.check_prompt_length(each, longest)
            prompt = _encode_input(text_processor, body, each, kept)
            key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            request = text_processor.request(
                {key: prompt, "cache_salt": body.cache_salt}, params
            ).request
            request = replace(request, pooling=body.pooling_type)
            check_request_and_get_ids(request, limits)
        states.append(RequestOutputState(request, None, None))
    return states


def _encode_input(
    text_processor: TextProcessor,
    body: embeddings_schema.EmbeddingRequest,
    prompt: str | list[int],
    max_tokens: int | None,
) -> str | list[int]:
    """The first tokens of an input; the text itself if it is read whole, as prompts are."""
    if not isinstance(prompt, str):
        return prompt[:max_tokens]
    assert text_processor.tokenizer is not None, "texts are refused without one"
    if body.add_special_tokens is False:
        ids = encode_text(text_processor.tokenizer, prompt, parse_special=False, add_special=False)
        return ids[:max_tokens]
    if max_tokens is None:
        return prompt
    return text_processor.tokenizer.encode_beginning(prompt, max_tokens)


def _encode_messages(
    text_processor: TextProcessor, body: embeddings_schema.EmbeddingRequest, max_tokens: int
) -> list[int]:
    """The tokens of a conversation through the chat template.

    Raises:
        RequestError: it cannot be rendered, is too long, or has pictures.
    """
    messages = body.messages or []
    if any(map(message_has_images, messages)):
        raise RequestError("messages: pictures are not embedded; send texts alone")
    rendered = {
        "messages": messages,
        # no answer follows unless the client says so, as in vLLM
        "add_generation_prompt": bool(body.add_generation_prompt),
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    converted = make_converted_request(TokenizeRequest, rendered)
    return encode_prompt(text_processor, converted, max_tokens)


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

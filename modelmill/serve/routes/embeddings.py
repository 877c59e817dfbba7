"""POST /v1/embeddings: texts as vectors, from the states that the engine's head reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.request_state import RequestState
from modelmill.runtime.request_limits import RequestLimits, check_request
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.embeddings_schema import MAX_OUTPUT_FLOATS, EmbeddingRequest, format_embedding
from modelmill.serve.routes.common import get_service, submit_requests
from modelmill.serve.stream import wait_or_disconnect
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Any:
    """The normed final hidden states of each input, pooled and brought to length 1."""
    service = get_service(request)
    engine = service.get_engine(body.model)
    bounds, language = engine.request_limits, engine.text_processor
    engine.check_capacity(len(body.inputs()))
    dialogues, ticket = await submit_requests(
        request, engine, _make_request_states, language, body, bounds, get_states=list
    )
    await wait_or_disconnect(request, ticket)
    return Response(
        await service.run_in_thread(_response_body, body, dialogues), media_type="application/json"
    )


def _make_request_states(
    text_processor: TextProcessor, body: EmbeddingRequest, limits: RequestLimits
) -> list[RequestState]:
    """Each is checked before the next is read: one that is impossible ends the work on all of
    them.
    """
    inputs = body.inputs()
    if text_processor.tokenizer is None and any(isinstance(each, str) for each in inputs):
        raise RequestError("input must be token ids: this engine has no tokenizer")
    params = SamplingParams(max_tokens=0)
    out = []
    for each in inputs:
        text_processor.check_length(each, limits.max_len)
        key = "prompt" if isinstance(each, str) else "prompt_token_ids"
        asked = text_processor.request({key: each, "cache_salt": body.cache_salt}, params).request
        out.append(RequestState(replace(asked, pooling=body.pooling_type), None, None))
        check_request(out[-1].request, limits)
    return out


def _response_body(body: EmbeddingRequest, request_states: list[RequestState]) -> bytes:
    """The answer as JSON, vector by vector: a large one written at once would hold everybody else
    up.
    """
    packed = body.encoding_format == "base64"
    parts, numbers = [], 0
    for index, dialogue in enumerate(request_states):
        state = dialogue.output.embedding
        assert state is not None, "an embedding was asked for"
        found = format_embedding(state, body.dimensions, packed)
        numbers += len(found)
        if not packed and numbers > MAX_OUTPUT_FLOATS:
            raise RequestError(
                f"input has vectors of more than {MAX_OUTPUT_FLOATS} numbers; ask for base64, or "
                "for fewer"
            )
        parts.append(
            json.dumps(
                {"object": "embedding", "index": index, "embedding": found}, separators=(",", ":")
            )
        )
    count = sum(len(dialogue.output.prompt_token_ids) for dialogue in request_states)
    rest = {"model": body.model, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return f'{{"object":"list","data":[{",".join(parts)}],{json.dumps(rest, separators=(",", ":"))[1:]}'.encode()  # noqa: E501

"""POST /v1/embeddings: texts as vectors, from the states that the engine's head reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.runtime.check import Bounds, check
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.embeddings import MOST_NUMBERS, EmbeddingRequest, vector
from modelmill.serve.routes.common import service_of, submitted
from modelmill.serve.stream import finished

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Any:
    """The normed final hidden states of each input, pooled and brought to length 1."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    engine.check_room(len(body.inputs()))
    dialogues, ticket = await submitted(request, engine, _dialogues, language, body, bounds, of=list)
    await finished(request, ticket)
    return Response(await service.aside(_whole, body, dialogues), media_type="application/json")


def _dialogues(language: Language, body: EmbeddingRequest, bounds: Bounds) -> list[Dialogue]:
    """Each is checked before the next is read: one that is impossible ends the work on all of them."""
    inputs = body.inputs()
    if language.tokenizer is None and any(isinstance(each, str) for each in inputs):
        raise RequestError("input must be token ids: this engine has no tokenizer")
    params = SamplingParams(max_tokens=0)
    out = []
    for each in inputs:
        language.check_size(each, bounds.longest)
        key = "prompt" if isinstance(each, str) else "prompt_token_ids"
        asked = language.request({key: each, "cache_salt": body.cache_salt}, params).request
        out.append(Dialogue(replace(asked, pooling=body.how), None, None))
        check(out[-1].request, bounds)
    return out


def _whole(body: EmbeddingRequest, dialogues: list[Dialogue]) -> bytes:
    """The answer as JSON, vector by vector: a large one written at once would hold everybody else up."""
    packed = body.encoding_format == "base64"
    parts, numbers = [], 0
    for index, dialogue in enumerate(dialogues):
        state = dialogue.answer.embedding
        assert state is not None, "an embedding was asked for"
        found = vector(state, body.dimensions, packed)
        numbers += len(found)
        if not packed and numbers > MOST_NUMBERS:
            raise RequestError(f"input has vectors of more than {MOST_NUMBERS} numbers; ask for base64, or for fewer")
        parts.append(json.dumps({"object": "embedding", "index": index, "embedding": found}, separators=(",", ":")))
    count = sum(len(dialogue.answer.prompt_token_ids) for dialogue in dialogues)
    rest = {"model": body.model, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return f'{{"object":"list","data":[{",".join(parts)}],{json.dumps(rest, separators=(",", ":"))[1:]}'.encode()

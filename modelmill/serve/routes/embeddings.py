"""POST /v1/embeddings: texts as vectors, from the states that the engine's head reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve.embeddings import EmbeddingRequest, vector
from modelmill.serve.routes.common import service_of, submitted
from modelmill.serve.stream import finished

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Any:
    """The normed final hidden states of each input, pooled and brought to length 1."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    dialogues = await service.aside(_dialogues, language, body, bounds.longest)
    ticket = submitted(request, engine, dialogues)
    await finished(request, ticket)
    return JSONResponse(await service.aside(_whole, body, dialogues))


def _dialogues(language: Language, body: EmbeddingRequest, longest: int) -> list[Dialogue]:
    inputs = body.inputs()
    if language.tokenizer is None and any(isinstance(each, str) for each in inputs):
        raise RequestError("input must be token ids: this engine has no tokenizer")
    params = SamplingParams(max_tokens=0)
    out = []
    for each in inputs:
        language.check_size(each, longest)
        key = "prompt" if isinstance(each, str) else "prompt_token_ids"
        asked = language.request({key: each, "cache_salt": body.cache_salt}, params).request
        out.append(Dialogue(replace(asked, pooling=body.how), None, None))
    return out


def _whole(body: EmbeddingRequest, dialogues: list[Dialogue]) -> dict[str, Any]:
    packed = body.encoding_format == "base64"
    data = []
    for index, dialogue in enumerate(dialogues):
        state = dialogue.answer.embedding
        assert state is not None, "an embedding was asked for"
        data.append({"object": "embedding", "index": index, "embedding": vector(state, body.dimensions, packed)})
    count = sum(len(dialogue.answer.prompt_token_ids) for dialogue in dialogues)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}

"""POST /completion and /infill, as llama.cpp's server has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_answer import streamed_or_whole_response
from modelmill.serve.dialects.llama_cpp_answer import LlamaCppAnswerBuilder
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest, LlamaCppCompletionRequest
from modelmill.serve.response_body_models import LLAMA_CPP_ERRORS
from modelmill.serve.routes.common import acquire_service_and_engine
from modelmill.serve.routes.completions import submit_converted_completion

router = APIRouter(route_class=BodyRoute, responses=LLAMA_CPP_ERRORS)


@router.post("/completion")
async def completion(body: LlamaCppCompletionRequest, request: Request) -> Any:
    """Continue a text; control tokens in it are parsed."""
    return await _run_completion(body, request)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Any:
    """Write what stands between two texts, for models with tokens that mark them."""
    return await _run_completion(body, request)


async def _run_completion(body: LlamaCppCompletionRequest | InfillRequest, request: Request) -> Any:
    _, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body.check()
    engine.check_capacity(len(body.prompts()))
    completion, handle = await submit_converted_completion(request, engine, body)
    answer = LlamaCppAnswerBuilder(body.model, completion, handle, engine, body.response_fields)
    return await streamed_or_whole_response(request, handle, answer, streams=bool(body.stream))

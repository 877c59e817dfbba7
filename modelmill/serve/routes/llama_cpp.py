"""POST /completion and /infill, as llama.cpp's server has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.sequence import RequestLimits
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_answer import streamed_or_whole_response
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.llama_cpp_answer import LlamaCppAnswerBuilder
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest, LlamaCppCompletionRequest
from modelmill.serve.routes.common import acquire_engine, prepare_and_submit_requests
from modelmill.serve.routes.completions import completion_request_states
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/completion")
async def completion(body: LlamaCppCompletionRequest, request: Request) -> Any:
    """Continue a text; control tokens in it are parsed."""
    return await _run_completion(body, request)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Any:
    """Write what stands between two texts, for models with tokens that mark them."""
    return await _run_completion(body, request)


async def _run_completion(body: LlamaCppCompletionRequest | InfillRequest, request: Request) -> Any:
    _, engine = await acquire_engine(request, body.model, body.keep_alive)
    body.check()
    engine.check_capacity(1)
    (made, _), handle = await prepare_and_submit_requests(
        request,
        engine,
        _prepare_completion,
        body,
        engine.request_limits,
        get_states=lambda prepared: prepared[1],
    )
    answer = LlamaCppAnswerBuilder(body.model or engine.name, made, handle)
    return await streamed_or_whole_response(request, handle, answer, streams=bool(body.stream))


def _prepare_completion(
    text_processor: TextProcessor,
    body: LlamaCppCompletionRequest | InfillRequest,
    limits: RequestLimits,
) -> tuple[CompletionRequest, list[RequestOutputState]]:
    made = body.to_completion_request()
    made.check()
    return made, completion_request_states(text_processor, made, limits)

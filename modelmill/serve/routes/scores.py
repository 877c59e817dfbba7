"""POST /v1/rerank and /v1/score: similarities of texts, from their embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.request_output_state import RequestOutputState
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.embeddings_schema import EmbeddingRequest
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.prompt_fields import check_at_most_engine_length
from modelmill.serve.routes import common
from modelmill.serve.routes.embeddings import embedding_request_states
from modelmill.serve.scoring import SIMILARITY_METRIC, embedding_cosine, rerank_results
from modelmill.serve.scoring_schema import RerankRequest, ScoreRequest
from modelmill.serve.stream import wait_or_disconnect

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Any:
    """Sort documents by the cosine of their embedding with the query's."""
    texts = body.document_texts()
    states = await _run_text_embedding_requests(
        request, body, [body.query, *texts], body.text_field_path, body.max_tokens_per_doc
    )
    results = rerank_results(body, states, texts)
    if body.texts is not None:
        return SurrogateSafeJsonResponse(results)
    return SurrogateSafeJsonResponse(
        {
            "id": common.random_id("rerank"),
            "model": body.model,
            "method": SIMILARITY_METRIC,
            "results": results,
            "usage": _usage(states),
        }
    )


@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Any:
    """The cosine of the embeddings of each pair of texts."""
    pairs = body.pairs()
    places: dict[str, int] = {}
    for text in (each for pair in pairs for each in pair):
        places.setdefault(text, len(places))
    distinct = list(places)
    states = await _run_text_embedding_requests(
        request, body, distinct, lambda index: body.text_field_path(distinct[index])
    )
    scores = [embedding_cosine(states[places[one]], states[places[other]]) for one, other in pairs]
    return SurrogateSafeJsonResponse(
        {
            "id": common.random_id("score"),
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "method": SIMILARITY_METRIC,
            "data": [
                {"index": index, "object": "score", "score": each}
                for index, each in enumerate(scores)
            ],
            "usage": _usage(states),
        }
    )


async def _run_text_embedding_requests(
    request: Request,
    body: RerankRequest | ScoreRequest,
    texts: list[str],
    text_field_path: Callable[[int], str],
    max_tokens_per_doc: int | None = None,
) -> list[RequestOutputState]:
    _, engine = await common.acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(len(texts))
    check_at_most_engine_length(
        "max_tokens_per_doc", max_tokens_per_doc, engine.request_limits.max_len
    )
    # the first text is a query, which is read whole
    max_tokens = [None, *([max_tokens_per_doc or None] * (len(texts) - 1))]
    made = EmbeddingRequest.model_validate(
        {
            "model": body.model,
            "input": texts,
            "cache_salt": body.cache_salt,
            "truncate_prompt_tokens": body.truncate_prompt_tokens,
        }
    )
    states, handle = await common.prepare_and_submit_requests(
        request,
        engine,
        embedding_request_states,
        made,
        engine.request_limits,
        text_field_path,
        max_tokens,
        get_states=list,
    )
    await wait_or_disconnect(request, handle)
    return states


def _usage(states: Sequence[RequestOutputState]) -> dict[str, int]:
    count = sum(len(state.output.prompt_token_ids) for state in states)
    return {"prompt_tokens": count, "total_tokens": count}

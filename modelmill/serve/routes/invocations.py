"""POST /invocations: SageMaker's one path for every request, served by the body's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from pydantic import ConfigDict, model_validator
from starlette.responses import Response

from modelmill.serve.body_route import BodyRoute, call_endpoint, validate_body
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.embeddings_schema import EmbeddingRequest
from modelmill.serve.errors import invalid_request
from modelmill.serve.routes.chat import chat_completions
from modelmill.serve.routes.common import get_service
from modelmill.serve.routes.completions import completions
from modelmill.serve.routes.embeddings import embeddings
from modelmill.serve.routes.scores import rerank, score
from modelmill.serve.scoring_schema import RerankRequest, ScoreRequest
from modelmill.serve.strict_models import StrictModel

router = APIRouter(route_class=BodyRoute, include_in_schema=False)


class InvokedRoute(NamedTuple):
    """A route that /invocations stands for."""

    path: str
    model: type[StrictModel]
    endpoint: Callable[..., Any]


INVOKED_ROUTES: Mapping[str, InvokedRoute] = {
    "messages": InvokedRoute("/v1/chat/completions", ChatRequest, chat_completions),
    "prompt": InvokedRoute("/v1/completions", CompletionRequest, completions),
    "input": InvokedRoute("/v1/embeddings", EmbeddingRequest, embeddings),
    "query": InvokedRoute("/v1/rerank", RerankRequest, rerank),
    "text_1": InvokedRoute("/v1/score", ScoreRequest, score),
    "queries": InvokedRoute("/v1/score", ScoreRequest, score),
}
"""The routes by the field that only their bodies have; the first one that is there counts."""


class InvocationRequest(StrictModel):
    """Request body of POST /invocations: that of another route, which validates it."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, raw: Any) -> Any:
        """Keep every key: they are another model's."""
        return raw


@router.post("/invocations")
async def invocations(body: InvocationRequest, request: Request) -> Response:
    """Answer as the route does whose field the body has."""
    fields = body.model_extra or {}
    route = next(
        (route for name, route in INVOKED_ROUTES.items() if fields.get(name) is not None), None
    )
    if route is None:
        names = ", ".join(INVOKED_ROUTES)
        raise invalid_request(f"the request's body has none of these fields: {names}")
    # errors, logs and metrics are those of the route
    request.scope["path"] = route.path
    validated = await get_service(request).run_in_thread(validate_body, fields, route.model)
    return await call_endpoint(route.endpoint, validated, request)

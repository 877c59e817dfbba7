"""Further names of paths, as other servers and their clients write them."""

from __future__ import annotations

from collections.abc import Mapping

PATH_ALIASES: Mapping[str, str] = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/responses/compact": "/v1/responses/compact",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/embeddings": "/v1/embeddings",
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/models": "/v1/models",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/score": "/v1/score",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/health": "/health",
}
"""The path as sent → the route that serves it."""
UNVERSIONED_MODELS_PREFIX = "/models/"


def canonical_path(path: str) -> str:
    """The path of the route that serves a path; the path itself if it is no other name."""
    if path.startswith(UNVERSIONED_MODELS_PREFIX):
        return f"/v1{path}"
    return PATH_ALIASES.get(path, path)

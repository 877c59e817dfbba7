"""Scores of pairs of texts: the cosine of their embeddings, named so in every response.

A model that was trained to score pairs (a cross-encoder) would read both texts together; engines
here do not, so a score is a similarity of two vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from modelmill.outputs import truncate_and_normalize
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.scoring_schema import RerankRequest

SIMILARITY_METRIC = "embedding_cosine"


def embedding_cosine(one: RequestOutputState, other: RequestOutputState) -> float:
    """The cosine of two embeddings. Raises RequestError for one of length zero."""
    return float(_unit_embedding(one) @ _unit_embedding(other))


def _unit_embedding(state: RequestOutputState) -> np.ndarray:
    assert state.output.embedding is not None, "the request has an embedding"
    return truncate_and_normalize(state.output.embedding)


def rerank_results(
    body: RerankRequest, states: list[RequestOutputState], texts: list[str]
) -> list[dict[str, Any]]:
    """The documents by falling score; those of ``texts`` as TEI returns them.

    Args:
        body: the request.
        states: of the query, then of each document.
        texts: of the documents.
    """
    query, *documents = states
    scores = [embedding_cosine(query, document) for document in documents]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    top = order if body.top_n is None else order[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in top:
        if body.texts is not None:
            result: dict[str, Any] = {"index": index, "score": scores[index]}
            if body.return_text:
                result["text"] = texts[index]
        else:
            result = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": texts[index]}
        results.append(result)
    return results

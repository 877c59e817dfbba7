"""What callers hand to an engine: prompts and sampling parameters in all their forms; and its
embeddings as rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.outputs import RequestOutput, unit_vector
from modelmill.text_processor import Prompt


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list; a list of ids is one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    whole = bool(prompts) and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts)
    return [prompts] if whole else prompts


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """Parameters for each of ``count`` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams | None) for one in params
    ):
        raise RequestError(
            "sampling takes SamplingParams, one for all prompts or a list with one a prompt"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one, or one a prompt"
        )
    return list(params)


def check_params(params: SamplingParams | None) -> SamplingParams | None:
    """Of one prompt. Raises RequestError for what is none."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"sampling takes SamplingParams, not {type(params).__name__}")
    return params


def stack_embeddings(outputs: Sequence[RequestOutput], dimensions: int | None) -> np.ndarray:
    """The embeddings of answers as rows [N, H] float32 of length 1. Raises RequestError."""
    if not outputs:
        raise RequestError("there is nothing to embed; give at least one prompt")
    states = [answer.embedding for answer in outputs]
    assert all(state is not None for state in states), "embeddings were asked for"
    return np.stack([unit_vector(state, dimensions) for state in states if state is not None])

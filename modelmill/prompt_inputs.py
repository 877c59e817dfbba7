"""Normalizes the arguments of ``generate`` and ``embed``, and stacks embeddings into an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.types import SamplingParams
from modelmill.outputs import RequestOutput, unit_vector
from modelmill.text_processor import Prompt


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    is_ids = bool(prompts) and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts)
    return [prompts] if is_ids else prompts


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
            "sampling parameters must be one SamplingParams for all prompts, or a list with one "
            "per prompt"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one, or one per prompt"
        )
    return list(params)


def check_params(params: SamplingParams | None) -> SamplingParams | None:
    """Return the parameters of one prompt; RequestError if they are of another type."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"sampling parameters must be SamplingParams, not {type(params).__name__}"
        )
    return params


def stack_embeddings(outputs: Sequence[RequestOutput], dimensions: int | None) -> np.ndarray:
    """Stack embeddings as rows [N, H] float32 of length 1. Raises RequestError."""
    if not outputs:
        raise RequestError("there is nothing to embed; give at least one prompt")
    states = [output.embedding for output in outputs]
    assert all(state is not None for state in states), "every output of a pooling request has one"
    return np.stack([unit_vector(state, dimensions) for state in states if state is not None])

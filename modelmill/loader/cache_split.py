"""Divides one amount of memory between KV pages and recurrent states."""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.artifact.store import Artifact
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError
from modelmill.loader.model_loader import build_rank_model
from modelmill.loader.state_capacity import STATE_MEMORY_FRACTION, state_capacity
from modelmill.nn.layer_stack import model_state_shape
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup


def with_split_cache_bytes(config: RunConfig, artifact: Artifact, cache_bytes: int) -> RunConfig:
    """Return ``config`` with the sizes of the KV cache and of the recurrent states.

    A model without recurrent state gets all of it for KV pages. One with it gets as many slots as
    fit STATE_MEMORY_FRACTION, and KV pages for the rest.

    Args:
        config: of the engine; a ``state_cache_bytes`` that is set stays.
        artifact: the engine.
        cache_bytes: of one rank, for both.

    Raises:
        CapacityError: not even one sequence's state fits.
    """
    ranks = TPGroup(size=config.tp)
    shape = model_state_shape(build_rank_model(artifact, ranks, config.enable_expert_parallel))
    state_bytes = 0
    if shape:
        if config.state_cache_bytes is None:
            share = max(int(cache_bytes * STATE_MEMORY_FRACTION), 1)
            config = replace(config, state_cache_bytes=share)
        dtype = getattr(torch, artifact.manifest.build["dtype"])
        capacity = state_capacity(shape, dtype, config, 0, SINGLE_RANK)
        state_bytes = 0 if capacity is None else capacity.nbytes
        config = replace(config, state_cache_bytes=state_bytes)
    if cache_bytes - state_bytes < 1:
        raise CapacityError("the recurrent states leave no memory for the KV cache")
    return replace(config, kv_cache_bytes=cache_bytes - state_bytes)

"""What one rank of a tensor-parallel group keeps of a planned engine; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import nn

from modelmill.builder.tensor_plan import PlannedTensor
from modelmill.nn.kv import ModelKVCacheSpec, kv_cache_dtype
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.linear import Linear
from modelmill.nn.recurrent_state import ModelStateSpec
from modelmill.nn.shard_model import shard_model_for_rank
from modelmill.nn.whole_model_decode import model_kv_shape

if TYPE_CHECKING:
    from modelmill.builder.plan import BuildPlan

WeightFormatAndShape = tuple[str, tuple[int, ...]]
"""A weight format, and the shape of a rank's part of a matrix."""


@dataclass(frozen=True)
class RankShardSummary:
    """What a rank keeps.

    Attributes:
        weight_bytes: Of its parts of all tensors.
        matrices: Format and shape of its parts of the matrices.
        kv: The KV cache of its heads.
        state: Its part of a sequence's recurrent state.
    """

    weight_bytes: int
    matrices: tuple[WeightFormatAndShape, ...]
    kv: ModelKVCacheSpec
    state: ModelStateSpec


def single_rank_memory(plan: BuildPlan) -> RankShardSummary:
    """Return what an engine keeps that is not split."""
    assert plan.kv is not None, "a language model has a KV cache"
    return RankShardSummary(plan.weight_bytes, matrix_formats_and_shapes(plan), plan.kv, plan.state)


def matrix_formats_and_shapes(plan: BuildPlan) -> tuple[WeightFormatAndShape, ...]:
    """Return format and shape of every matrix."""
    return tuple(
        (each.weight_format, each.shape) for each in plan.tensors if each.weight_format is not None
    )


def largest_rank_memory(
    plan: BuildPlan, ranks: int, expert_parallel: bool = False
) -> RankShardSummary:
    """Return what that rank keeps which has the most weights.

    Args:
        plan: Of a language model.
        ranks: How many compute a step together.
        expert_parallel: Whether they divide whole experts.

    Raises:
        UsageError: the model cannot be split over so many ranks, or has no experts to divide.
    """
    if ranks == 1:
        return single_rank_memory(plan)
    aligned = _make_column_alignment_lookup(plan)
    memories = (_rank_memory(plan, aligned, rank, ranks, expert_parallel) for rank in range(ranks))
    return max(memories, key=lambda memory: memory.weight_bytes)


def _rank_memory(
    plan: BuildPlan,
    aligned: Callable[[str], int],
    rank: int,
    ranks: int,
    expert_parallel: bool,
) -> RankShardSummary:
    with torch.device("meta"):
        model = plan.family.Model(plan.model_config)
    shard_model_for_rank(model, rank, ranks, aligned, expert_parallel)
    modules, buffers = dict(model.named_modules()), dict(model.named_buffers())
    total, matrices = 0, []
    for planned in plan.tensors:
        if planned.weight_format is None:
            buffer = buffers.get(planned.rule.target)
            total += 0 if buffer is None else buffer.numel() * planned.dtype.itemsize
        elif planned.module in modules:  # an expert of another rank is not there
            module = modules[planned.module]
            assert isinstance(module, Linear)
            total += _shard_matrix_bytes(planned, module.shape)
            matrices.append((planned.weight_format, tuple(module.shape)))
    return RankShardSummary(
        total, tuple(matrices), _rank_kv_shape(plan, model, ranks), model_state_shape(model)
    )


def _rank_kv_shape(plan: BuildPlan, model: nn.Module, ranks: int) -> ModelKVCacheSpec:
    dtype = kv_cache_dtype(plan.config.kv_cache_dtype, plan.dtype)
    return model_kv_shape(model, plan.max_model_len, None, dtype, ranks)


def _make_column_alignment_lookup(plan: BuildPlan) -> Callable[[str], int]:
    """Return the multiple at which the columns of a matrix, by its module, may be cut."""
    aligned = {
        each.module: _tensor_column_alignment(each)
        for each in plan.tensors
        if each.weight_format is not None
    }
    return lambda module: aligned.get(module, 1)  # a tied head has no matrix of its own


def _tensor_column_alignment(planned: PlannedTensor) -> int:
    columns = planned.shape[1]
    if any(name.endswith("perm") for name in planned.stored_info):
        return columns
    layouts = () if planned.prequantized_weight is None else planned.prequantized_weight.layouts
    sizes = [layout.group_size for layout in layouts if layout is not None]
    if planned.recipe is not None:
        sizes.append(planned.recipe.pack_options.get("group_size", 1))
    return lcm(*(columns if size < 1 else size for size in sizes))


def _shard_matrix_bytes(planned: PlannedTensor, part: tuple[int, int]) -> int:
    """Return the bytes of a part of a matrix."""
    whole = planned.shape[0], planned.shape[1]
    if part == whole:
        return planned.nbytes
    return sum(
        _shard_tensor_numel(shape, whole, part) * dtype.itemsize
        for shape, dtype in planned.stored_info.values()
    )


def _shard_tensor_numel(
    shape: tuple[int, ...], whole: tuple[int, int], part: tuple[int, int]
) -> int:
    """Return how many numbers of a stored tensor belong to a part of its matrix.

    Its dimensions are rows, then columns or fewer of them, such as groups; in a vector one of both.
    """
    if len(shape) == 2:
        scaled = shape[0] * part[0] // whole[0], -(-shape[1] * part[1] // whole[1])
        return scaled[0] * scaled[1]
    axes = [axis for axis in (0, 1) if shape == (whole[axis],)]
    return part[axes[0]] if axes else torch.Size(shape).numel()

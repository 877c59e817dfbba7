"""Tensor parallelism: every module keeps its rank's shard, before any weight is read.

A branch (attention, MLP) is sharded so that it needs nothing of the other ranks: by heads, or by
inner channels, with the columns of its last product that read them. The ranks' outputs are partial
sums of the branch; the norm behind it all-reduces them. What is divided how is in the layer's spec;
a layer whose spec says ``NO_PARTITIONS``, as a vision encoder's, is on every rank. The experts of a
mixture are divided by inner channels, too, or in expert parallelism each rank has some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import cast

from torch import nn

from modelmill.core.errors import UsageError
from modelmill.nn.embedding_and_head import LMHead
from modelmill.nn.kv import ModelKVCacheSpec
from modelmill.nn.layer_spec import (
    LayerSpec,
    LinearSpec,
    RopeCacheSpec,
    SharedKVQuerySpec,
    layer_spec,
)
from modelmill.nn.layer_stack import (
    kv_shape_with_sizes,
    layer_stacks,
    model_state_shape,
    state_shape,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import (
    ChannelShardable,
    ExpertPartition,
    ExpertShardable,
    HeadPartition,
    HeadShardable,
    NormedChannelPartition,
    Partition,
    StateHeadPartition,
)
from modelmill.parallel.shard import Range, Shard, range_lengths
from modelmill.parallel.tp_group import TPGroup


def shard_model(
    model: nn.Module,
    tp_group: TPGroup,
    alignment_for: Callable[[str], int],
    expert_parallel: bool = False,
) -> None:
    """Leave of a model without weights what ``tp_group.rank`` computes, KV heads and states too.

    Args:
        model: The model.
        tp_group: The rank's group.
        alignment_for: At which multiples the columns of a linear layer (by name) may be cut.
        expert_parallel: Whether ranks divide whole experts instead of the channels of each.

    Raises:
        UsageError: There are more ranks than parts, or no experts to divide.
    """
    if tp_group.size == 1:
        return
    if expert_parallel:
        _keep_local_experts(model, tp_group)
    alignment_for = _make_uniform_alignment_lookup(model, alignment_for)
    heads = [
        each
        for stack in layer_stacks(model)
        for index, layer in enumerate(model.get_submodule(stack.path).children())
        for each in _shard_layer(
            layer,
            tp_group,
            _make_child_alignment_lookup(f"{stack.path}.{index}", alignment_for),
            expert_parallel=expert_parallel,
        )
    ]
    for name, module in model.named_modules():
        if isinstance(module, LMHead):
            module.shard(tp_group, _make_child_alignment_lookup(name, alignment_for))
    shape = model.kv
    assert isinstance(shape, ModelKVCacheSpec)
    if heads:
        dims = (dim for _, dim in shape.layer_kv_sizes)
        if shape.sizes and not all(each.even for each in heads):
            # the ranks share page tables, in which the sizes of layers are to one another as here
            shape = replace(shape, layer_windows=())
        sizes = zip((each.count for each in heads), dims, strict=True)
        model.kv = kv_shape_with_sizes(shape, tuple(sizes))  # type: ignore[assignment]
    if model_state_shape(model):
        layers = model.get_submodule("layers").children()
        model.state = state_shape(layers)  # type: ignore[assignment]


def shard_model_for_rank(
    model: nn.Module,
    rank: int,
    size: int,
    alignment_for: Callable[[str], int],
    expert_parallel: bool = False,
) -> None:
    """The same without processes: to plan what rank ``rank`` of ``size`` will have."""
    shard_model(model, TPGroup(rank, size), alignment_for, expert_parallel)


def _keep_local_experts(model: nn.Module, tp_group: TPGroup) -> None:
    """Leave in each mixture the rank's experts."""
    mixtures = list(_moe_layers_and_partitions(model))
    if not mixtures:
        raise UsageError("--enable-expert-parallel: the model has no experts; leave the option out")
    for mixture, part in mixtures:
        mixture.keep_local_experts(part.rank_expert_range(tp_group.rank, tp_group.size))


def num_experts_by_rank(model: nn.Module, size: int) -> tuple[int, ...]:
    """How many experts of a mixture each of ``size`` ranks has in expert parallelism."""
    part = next(part for _, part in _moe_layers_and_partitions(model))
    return range_lengths([part.rank_expert_range(rank, size) for rank in range(size)])


def _moe_layers_and_partitions(
    model: nn.Module,
) -> Iterator[tuple[ExpertShardable, ExpertPartition]]:
    """The mixtures of a model, and how they are divided."""
    for layer in model.get_submodule("layers").children():
        for part in layer_spec(layer).partitions:
            if isinstance(part, ExpertPartition):
                yield cast(ExpertShardable, layer.get_submodule(part.module)), part


def _make_uniform_alignment_lookup(
    model: nn.Module, alignment_for: Callable[[str], int]
) -> Callable[[str], int]:
    """The same, with one alignment of heads in all layers if layers share pages or their tensors.

    A rank then has the same heads in all of them.
    """
    layers = dict(model.get_submodule("layers").named_children())
    specs = {f"layers.{name}": layer_spec(layer) for name, layer in layers.items()}
    reads_others = any(any(spec.modules_of_type(SharedKVQuerySpec)) for spec in specs.values())
    kv = model.kv
    assert isinstance(kv, ModelKVCacheSpec)
    if not reads_others and not kv.layer_windows:
        return alignment_for
    linears = {
        f"{name}.{linear.path}"
        for name, spec in specs.items()
        for part in spec.partitions
        if isinstance(part, HeadPartition)
        for linear in spec.linears
        if linear.split_columns in part.split_axis_names
    }
    common = lcm(*map(alignment_for, sorted(linears)))
    return lambda name: common if name in linears else alignment_for(name)


@dataclass(frozen=True)
class _RankKVHeadCount:
    """How many KV heads of an attention a rank has, and whether every rank has as many."""

    count: int
    even: bool


def _shard_layer(
    layer: nn.Module,
    tp_group: TPGroup,
    alignment_for: Callable[[str], int],
    *,
    expert_parallel: bool,
) -> list[_RankKVHeadCount]:
    """Shard a layer by its spec; return the KV heads of each attention with a cache.

    expert_parallel: experts are whole, and those of other ranks are gone.
    """
    spec, rank, size = layer_spec(layer), tp_group.rank, tp_group.size
    ranges: dict[str, Range] = {}
    kv_heads = []
    for part in spec.partitions:
        if expert_parallel and isinstance(part, ExpertPartition):
            continue
        alignment = _column_alignment(spec, part, alignment_for)
        ranges |= part.rank_channel_ranges(rank, size, alignment)
        if isinstance(part, HeadPartition):
            attention = cast(HeadShardable, layer.get_submodule(part.module))
            attention.keep_local_heads(*part.rank_head_ranges(rank, size, alignment))
            if any(spec.modules_of_type(RopeCacheSpec)):
                ranges_by_rank = [part.rank_head_ranges(r, size, alignment)[1] for r in range(size)]
                even = len({end - first for first, end in ranges_by_rank}) == 1
                kv_heads.append(_RankKVHeadCount(attention.kv_heads, even))
        elif isinstance(part, NormedChannelPartition):
            norm = cast(ChannelShardable, layer.get_submodule(part.module))
            norm.keep_local_channels(ranges[part.name])
        elif isinstance(part, StateHeadPartition):
            mixer = cast(HeadShardable, layer.get_submodule(part.module))
            mixer.keep_local_heads(*part.rank_head_ranges(rank, size, alignment))
    for linear in spec.linears:
        if expert_parallel and linear.expert is not None:
            continue
        shard = _make_linear_shard_function(linear, ranges, rank)
        if shard is not None:
            module = layer.get_submodule(linear.path)
            assert isinstance(module, Linear)
            module.restrict_to_shard(shard(module.shape))
    return kv_heads


def _column_alignment(
    spec: LayerSpec,
    part: Partition,
    alignment_for: Callable[[str], int],
) -> int:
    """The multiple at which all linears can be cut whose columns a partition divides."""
    paths = [
        linear.path for linear in spec.linears if linear.split_columns in part.split_axis_names
    ]
    return lcm(*map(alignment_for, paths))


def _make_linear_shard_function(
    linear: LinearSpec, ranges: dict[str, Range], rank: int
) -> Callable[[tuple[int, int]], Shard] | None:
    """Of a linear's full shape, the rank's shard; None: every rank has all of it."""
    if linear.split_columns:
        columns = ranges[linear.split_columns]
        return lambda shape: Shard.from_columns(shape, columns, rank)
    if not any(part.split for part in linear.parts):
        return None
    rows = []
    for part in linear.parts:
        first, end = linear.part_row_range(part.name)
        a, b = ranges[part.split] if part.split else (0, end - first)
        rows.append((first + a, first + b))
    return lambda shape: Shard.from_rows(shape, *rows)


def _make_child_alignment_lookup(
    name: str, alignment_for: Callable[[str], int]
) -> Callable[[str], int]:
    return lambda child: alignment_for(f"{name}.{child}")

"""Tensor parallelism: every module keeps its rank's shard, before any weight is read.

A branch (attention, MLP) is sharded so that it needs nothing of the other ranks: by heads, or by
inner channels, with the columns of its last product that read them. The ranks' outputs are partial
sums of the branch; the norm behind it all-reduces them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from modelmill.nn.attention import Attention
from modelmill.nn.kv import KVShape
from modelmill.parallel.tp_group import TPGroup


def shard_model(model: nn.Module, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:
    """Leave of a model without weights what ``tp_group.rank`` computes, its KV heads included.

    alignment_for: at which multiples the columns of a linear layer (by name) may be cut. Raises
    UsageError where there are more ranks than parts.
    """
    if tp_group.size == 1:
        return
    for name, module in model.named_modules():
        shard = getattr(module, "shard", None)
        if shard is not None:
            shard(tp_group, _prefixed(name, alignment_for))
    heads = {m.kv_heads for m in model.modules() if isinstance(m, Attention)}
    assert len(heads) == 1, "all layers have as many KV heads"
    shape = model.kv
    assert isinstance(shape, KVShape)
    model.kv = replace(shape, kv_heads=heads.pop())


def _prefixed(name: str, alignment_for: Callable[[str], int]) -> Callable[[str], int]:
    return lambda child: alignment_for(f"{name}.{child}")

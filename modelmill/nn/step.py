"""The Step: everything one forward pass needs to know, passed to every module and never ambient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch

from modelmill.nn.kv import KVCache
from modelmill.nn.recurrent_state import StateStep
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup


@dataclass(frozen=True)
class Step:
    """T new tokens of B sequences, laid one after another.

    ids, positions, slots: [T] int64; a slot below 0 is padding and is not stored.
    rope_keys: [T] int64, ``model.rope_key(length)`` of each token; 0 where the rotation does not
    depend on a length. block_tables: [B, P] int32. query_start: [B + 1] int32. context_lens: [B]
    int32, keys including the new ones. logit_rows: [R] int64, the rows whose logits are needed;
    None: all T.
    max_query, max_context: host bounds of the rows, which kernel grids are sized by.
    tp_group: the ranks that compute the step together.
    embeds: [T, H] and embed_mask [T] bool where some tokens bring their own embeddings (images);
    else None.
    layer_inputs: [T, layers, P], what each layer reads beside the stream; None: nothing.
    state: the recurrent states of the sequences; None for a model that keeps none.
    layer_steps: the step as each layer computes it, where layers have page tables of their own
    (``core.page_groups``): with the slots and block tables of its page group. Empty: all layers
    compute this one.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope_keys: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    logit_rows: torch.Tensor | None
    max_query: int
    max_context: int
    kv: KVCache
    ops: Ops = field(repr=False)
    tp_group: TPGroup = field(default=SINGLE_RANK, repr=False)
    embeds: torch.Tensor | None = None
    embed_mask: torch.Tensor | None = None
    state: StateStep | None = None
    layer_inputs: torch.Tensor | None = None
    layer_steps: tuple[Step, ...] = field(default=(), repr=False)

    def by_layer(self) -> Iterable[Step]:
        """The step of each layer, in their order; without an end where all compute this one."""
        if self.layer_inputs is None or not self.layer_steps:
            return self.layer_steps or repeat(self)
        return (replace(each, layer_inputs=self.layer_inputs) for each in self.layer_steps)

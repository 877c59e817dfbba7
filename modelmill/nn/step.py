"""The Step: everything one forward pass needs to know, passed to every module and never ambient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat

import torch

from modelmill.nn.kv import KVCache
from modelmill.nn.latent_prompt_expansion import LatentExpansionPlan, plan_prompt_expansion
from modelmill.nn.recurrent_state import StepRecurrentStates
from modelmill.ops.latent_rope_cache import SlotPageIndices
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup

MIN_TOKENS_PER_LOGIT_ROW_TO_PRUNE = (
    2  # rows of the step per row with logits, from which leaving out the others pays
)


@dataclass(frozen=True)
class Step:
    """T new tokens of B sequences, laid one after another.

    ids, positions, slots: [T] int64; a slot below 0 is padding and is not stored.
    rope_frequency_ids: [T] int64, ``model.rope_frequency_id(length)`` of each token; 0 where
    the rotation does not depend on a length. block_tables: [B, P] int32. query_start: [B + 1]
    int32. context_lens: [B] int32, keys including the new ones. logit_rows: [R] int64, the rows
    whose logits are needed; None: all T.
    max_query, max_context: host bounds of the rows, which kernel grids are sized by.
    tp_group: the ranks that compute the step together.
    num_decodes: how many sequences have one token, where no token is padding and latent attention
    expands the others; None: it does not, or it is not known.
    num_prompt_keys: keys of these others; 0: they all begin in this step.
    is_padded: whether the step is padded for a prefill graph.
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
    rope_frequency_ids: torch.Tensor
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
    state: StepRecurrentStates | None = None
    layer_inputs: torch.Tensor | None = None
    layer_steps: tuple[Step, ...] = field(default=(), repr=False)
    num_decodes: int | None = None
    num_prompt_keys: int = 0
    is_padded: bool = False

    @property
    def is_graph_capturable(self) -> bool:
        """Whether a CUDA graph may contain the step, of decodes or padded."""
        return self.max_query == 1 or self.is_padded

    def iter_layer_steps(self) -> Iterable[Step]:
        """The step of each layer, in their order; without an end where all compute this one."""
        if self.layer_inputs is None or not self.layer_steps:
            return self.layer_steps or repeat(self)
        return (replace(each, layer_inputs=self.layer_inputs) for each in self.layer_steps)

    @cached_property
    def slot_page_indices(self) -> SlotPageIndices:
        """Where the step's tokens are stored; made once, for the layers that index pages in torch.

        A step that is made of this one by ``replace`` makes its own.
        """
        return SlotPageIndices.from_slots(self.slots, self.kv.page_size)

    @cached_property
    def latent_expansion_plan(self) -> LatentExpansionPlan | None:
        """The prompts that latent attention expands; made once, as ``slot_page_indices``."""
        return plan_prompt_expansion(self)

    def step_of_logit_rows(self) -> Step | None:
        """The step of the rows ``logit_rows``, each the only query of a sequence of its own.

        The last layer computes it once the keys and values of every token are stored: nothing but
        the head reads its output, and of a prompt one row. The query, output projection and MLP
        are left out for the others, with n layers about three quarters of one nth of the GEMMs.

        Returns:
            A step whose rows' contexts end with the rows themselves. None: all rows are computed.
        """
        rows = self.logit_rows
        if rows is None or len(self.ids) < MIN_TOKENS_PER_LOGIT_ROW_TO_PRUNE * len(rows):
            return None
        ends = self.query_start[1:]
        # the sequence of a row; a step that is all padding has none
        seq = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp_(max=len(ends) - 1)
        behind = ends[seq] - 1 - rows
        return replace(
            self,
            ids=self.ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            rope_frequency_ids=self.rope_frequency_ids[rows],
            block_tables=self.block_tables[seq],
            query_start=torch.arange(len(rows) + 1, dtype=ends.dtype, device=ends.device),
            context_lens=(self.context_lens[seq] - behind).to(ends.dtype),
            logit_rows=None,
            max_query=1,
            num_decodes=None,
        )

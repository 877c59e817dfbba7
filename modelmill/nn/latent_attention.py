"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token's keys and values of all heads follow from one latent vector, which is what the cache holds,
with a rotated key that all heads share. Decode absorbs the up-projections of keys and values: into
the queries, which so become queries of the latent vectors, and into the output. All query heads
then read one KV head, whose values are the first channels of its keys. Prompts that begin in the
step expand the latent vectors to the keys and values of each head: as many products to expand as to
absorb, and fewer in the attention itself, whose heads are smaller (192 and 128 channels in
DeepSeek-V3, not 576 and 512). Prompts with a history do what takes fewer products: expanding
projects the keys of the history as well (``LatentExpansionPolicy``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.attention_module_specs import (
    attention_core_spec,
    input_projection_spec,
    o_proj_spec,
)
from modelmill.nn.latent_prompt_expansion import LatentExpansionPlan
from modelmill.nn.layer_spec import (
    ROPE_VALUE_NAME,
    LinearRowBlock,
    LinearSpec,
    ModuleSpec,
    NormSpec,
    QuantSiteSpec,
    RopeCacheSpec,
)
from modelmill.nn.linear import Linear
from modelmill.nn.norm import NormConfig
from modelmill.nn.partition import HeadGroups, HeadPartition
from modelmill.nn.step import Step
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.latent_rope_cache import (
    LatentRopeCacheInputs,
    rotate_channels_from,
    store_rows_in_pages,
)
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.parallel.shard import Range

KV_UP_PROJECTION = "kv_b"  # the name of a core's buffer
NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the model's


@dataclass(frozen=True)
class LatentHeadPartition(HeadPartition):
    """Ranks divide query heads, whose queries and values have different sizes.

    ``groups`` has the values' size.

    Attributes:
        query_dim: Channels of a query.
    """

    query_dim: int = 0

    @property
    def split_axis_names(self) -> tuple[str, ...]:
        """The names by which linears are divided."""
        return self.q, "value_heads"

    def rank_channel_ranges(self, rank: int, size: int, alignment: int) -> dict[str, Range]:
        """The rank's channels by name."""
        (first, end), _ = self.rank_head_ranges(rank, size, alignment)
        value_dim = self.groups.head_dim
        return {
            self.q: (first * self.query_dim, end * self.query_dim),
            "value_heads": (first * value_dim, end * value_dim),
        }


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Sizes and switches of one layer's attention; takes the place of an ``AttentionSpec``.

    Attributes:
        query_rank: Size of the queries' latent vector; None: there is none.
        rank: Size of the latent vector of keys and values.
        nope_dim, rope_dim: Channels of a query that are not rotated, and that are.
        value_dim: Channels of a head's values.
        bias: Of the projections to latent vectors and of the output projection.
        scale: Factor of the scores.
        neighbours: Whether channels 2i and 2i + 1 rotate together, not i and i + rope_dim / 2.
    """

    hidden: int
    heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    scale: float
    neighbours: bool

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Channels that the cache holds of a token."""
        return self.rank + self.rope_dim

    @property
    def step_channels_per_head(self) -> int:
        """Channels per token and head that a step holds at once.

        These are the query, it absorbed, the output as latent vectors, and the output twice.
        """
        return self.query_dim + self.cached_dim + self.rank + 2 * self.value_dim

    def is_expansion_cheaper(self, prompts: Sequence[tuple[int, int]]) -> bool:
        """Whether prompts of (new tokens, keys) take fewer products expanded than absorbed.

        Expanding projects every key, absorbing every query; pairs of both have fewer channels then.
        """
        tokens, keys = (sum(each) for each in zip(*prompts, strict=True))
        pairs = sum(new * total - new * (new - 1) // 2 for new, total in prompts)
        projection = self.rank * (self.nope_dim + self.value_dim)
        expanded = keys * projection + pairs * (self.query_dim + self.value_dim)
        return expanded < tokens * projection + pairs * (self.cached_dim + self.rank)

    @property
    def partition(self) -> HeadPartition:
        """How ranks divide the heads; each has the latent vectors."""
        groups = HeadGroups(self.heads, 1, self.value_dim)
        return LatentHeadPartition("attn", groups, query_dim=self.query_dim)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the projections."""
        compressed = () if self.query_rank is None else (QuantSiteSpec("q_b"),)
        return QuantSiteSpec("qkv"), *compressed, QuantSiteSpec("o")

    def build_module(self, cache_index: int) -> LatentAttention:
        """The module."""
        return LatentAttention(self, cache_index)

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules of ``LatentAttention`` as a layer's ``attn``; "attn_input" → "attn_out"."""
        latent = LinearRowBlock("kv_a", self.rank), LinearRowBlock("k_pe", self.rope_dim)
        return (
            *self._query_specs(),
            input_projection_spec("kv_a_proj", "kv_a", latent, bias=self.bias),
            NormSpec(
                path="attn.kv_a_norm",
                reads=("kv_a",),
                writes=("latent",),
                reference=("kv_a_norm", "k_pe"),
                op="rms_norm",
            ),
            RopeCacheSpec(
                path="attn.rope_cache",
                reads=("q_flat", "latent", ROPE_VALUE_NAME),
                writes=("q",),
                reference=("q_rot",),
                cache_reference=("latent_rot", "latent_rot"),
                kv_heads=1,
                head_dim=self.cached_dim,
                keys_serve_as_values=True,
            ),
            attention_core_spec((KV_UP_PROJECTION,)),
            o_proj_spec(self.hidden, reads="attn", split_columns="value_heads", bias=self.bias),
        )

    def _query_specs(self) -> tuple[ModuleSpec, ...]:
        """The projection of queries, or the two with a norm between them."""
        width = self.heads * self.query_dim
        last = LinearSpec(
            path="attn.q_proj",
            reads=("attn_input" if self.query_rank is None else "q_latent",),
            writes=("q_flat",),
            site="qkv" if self.query_rank is None else "q_b",
            parts=(LinearRowBlock("q", width, "q_heads"),),
        )
        if self.query_rank is None:
            return (last,)
        rows = (LinearRowBlock("q_a", self.query_rank),)
        first = input_projection_spec("q_a_proj", "q_a", rows, bias=self.bias)
        norm = NormSpec(
            path="attn.q_a_norm",
            reads=("q_a",),
            writes=("q_latent",),
            reference=("q_a_norm",),
            op="rms_norm",
        )
        return first, norm, last


@dataclass(frozen=True)
class LatentExpansionPolicy:
    """Decides which steps expand prompts with a history, not only those that begin.

    Attributes:
        spec: Of the layers.
        max_keys: How many keys a step expands at most now: as many as its tokens may be. Their
            memory is planned, and fewer keys take less after an out-of-memory error.
    """

    spec: LatentAttentionSpec
    max_keys: Callable[[], int]

    @staticmethod
    def for_model(model: nn.Module, max_keys: Callable[[], int]) -> LatentExpansionPolicy | None:
        """That of a model; None: it has no latent attention."""
        specs = (each.spec for each in model.modules() if isinstance(each, LatentAttention))
        spec = next(specs, None)
        return None if spec is None else LatentExpansionPolicy(spec, max_keys)

    def __call__(self, prompts: Sequence[tuple[int, int]]) -> bool:
        """Whether a step expands its prompts of (new tokens, keys)."""
        keys = sum(total for _, total in prompts)
        return keys <= self.max_keys() and self.spec.is_expansion_cheaper(prompts)


class LatentNorm(nn.Module):
    """RMSNorm of the first channels; the others pass through."""

    weight: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self._norm = CachedOpBinding()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, width + …] → the same shape."""
        normed = self._norm(
            step.ops.rms_norm, x[:, : self.width].contiguous(), self.weight, NORM_EPS
        )
        return torch.cat((normed, x[:, self.width :]), -1)


class LatentAttention(nn.Module):
    """Projections → rotate and store the latent vector → attend to latent vectors → output."""

    def __init__(self, spec: LatentAttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.spec = spec
        self.kv_heads = 1
        rank, width = spec.query_rank, spec.heads * spec.query_dim
        if rank is not None:
            self.q_a_proj = Linear(spec.hidden, rank, spec.bias)
            self.q_a_norm = NormConfig(rank, NORM_EPS).build_norm_without_residual()
        self.q_proj = Linear(spec.hidden if rank is None else rank, width, False)
        self.kv_a_proj = Linear(spec.hidden, spec.cached_dim, spec.bias)
        self.kv_a_norm = LatentNorm(spec.rank)
        self.rope_cache = RopeAndLatentCache(spec, cache_index)
        self.core = LatentAttentionCore(spec, cache_index)
        self.o_proj = Linear(spec.heads * spec.value_dim, spec.hidden, spec.bias)

    def forward(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        q = self.project_queries(x, step)
        latent = self.kv_a_norm(self.kv_a_proj(x, step), step)
        q = self.rope_cache(q, latent, rope, step)
        return self.o_proj(self.core(q, step), step)

    def project_queries(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, heads·query_dim]."""
        if self.spec.query_rank is not None:
            x = self.q_a_norm(self.q_a_proj(x, step), step)
        return self.q_proj(x, step)

    def op_inputs(self, rope: RopeCosSin, step: Step) -> LatentRopeCacheInputs:
        """The inputs of the op ``latent_rope_cache`` beside queries and latent vectors."""
        assert rope.cos is not None, "latent attention rotates"
        assert rope.sin is not None, "latent attention rotates"
        index = self.rope_cache.cache_index
        return LatentRopeCacheInputs(
            self.kv_a_norm.weight,
            step.kv.k[index],
            step.slots,
            rope.cos,
            rope.sin,
            self.spec.neighbours,
            NORM_EPS,
            step.kv.scales(index)[0],
        )

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:  # noqa: ARG002  one, on every rank
        """Keep a rank's heads; ``forward`` then returns a partial sum."""
        self.core.keep_local_heads(heads)


def apply_position_query_scale(q: torch.Tensor, rope: RopeCosSin) -> torch.Tensor:
    """Rotated queries [T, heads, query_dim] times their factors by position, if there are any."""
    if rope.q_scale is None:
        return q
    return (q * rope.q_scale[:, None, None]).to(q.dtype)


class RopeAndLatentCache(nn.Module):
    """Rotates the ends of queries and latent vectors; writes these to their slots."""

    def __init__(self, spec: LatentAttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.spec, self.cache_index = spec, cache_index

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: RopeCosSin, step: Step
    ) -> torch.Tensor:
        """[T, heads·query_dim], [T, rank + rope_dim] → q [T, heads, query_dim]."""
        queries = self._rotate(q.view(len(q), -1, self.spec.query_dim), self.spec.nope_dim, rope)
        row = self._rotate(latent[:, None], self.spec.rank, rope)
        scale, _ = step.kv.scales(self.cache_index)
        store_rows_in_pages(row, step.kv.k[self.cache_index], scale, step.slot_page_indices)
        return apply_position_query_scale(queries, rope)

    def _rotate(self, x: torch.Tensor, begin: int, rope: RopeCosSin) -> torch.Tensor:
        """Rotate the channels of x [T, heads, D] from ``begin`` on."""
        assert rope.cos is not None, "latent attention rotates"
        assert rope.sin is not None, "latent attention rotates"
        return rotate_channels_from(x, begin, rope.cos, rope.sin, interleaved=self.spec.neighbours)


class LatentAttentionCore(nn.Module):
    """Attention of each query over its sequence's latent vectors.

    The up-projections are those of all heads, also on a rank that computes some of them; they are
    never quantized.
    """

    kv_b: torch.Tensor

    def __init__(self, spec: LatentAttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.spec, self.cache_index = spec, cache_index
        rows = spec.heads * (spec.nope_dim + spec.value_dim)
        self.register_buffer(KV_UP_PROJECTION, torch.empty(rows, spec.rank, device="meta"))
        self.heads: Range = (0, spec.heads)
        self._op = CachedOpBinding()
        self._packed_up_projections: tuple[torch.Tensor, ...] = ()

    def keep_local_heads(self, heads: Range) -> None:
        """Keep a rank's heads."""
        self.heads = heads
        self._packed_up_projections = ()

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys [heads, nope_dim, rank], and of values [heads, value_dim, rank]."""
        spec, (first, end) = self.spec, self.heads
        up = self.kv_b.view(spec.heads, -1, spec.rank)[first:end]
        key_up, value_up = up.split([spec.nope_dim, spec.value_dim], 1)
        return key_up, value_up

    def packed_up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same; of 16 bits on a CPU packed copies, else torch makes them in each product."""
        if self.kv_b.is_cuda or self.kv_b.dtype == torch.float32:
            return self.up_projections()
        if not self._packed_up_projections or self._packed_up_projections[0] is not self.kv_b:
            self._packed_up_projections = (
                self.kv_b,
                *(each.contiguous() for each in self.up_projections()),
            )
        _, key_up, value_up = self._packed_up_projections
        return key_up, value_up

    def forward(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, query_dim] → [T, heads·value_dim]."""
        prompts = step.latent_expansion_plan
        if prompts is None:
            return self.attend_absorbed(q, step)
        out = self.attend_expanded(q, step, prompts)
        rows = prompts.decode_rows
        if rows is not None and prompts.decode_step is not None:
            out[rows] = self.attend_absorbed(q[rows], prompts.decode_step)
        return out

    def attend_expanded(
        self, q: torch.Tensor, step: Step, prompts: LatentExpansionPlan
    ) -> torch.Tensor:
        """Attention of prompts, to keys and values of each head.

        These are the pages of a cache of their own, with one token each.
        """
        spec, width = self.spec, max(self.spec.query_dim, self.spec.value_dim)
        stored = self._read_cached_latents(q.dtype, step, prompts)
        latent, rotated = stored.split([spec.rank, spec.rope_dim], -1)
        by_head = latent.expand(q.shape[1], -1, -1)
        key_up, value_up = self.packed_up_projections()
        keys, values = (q.new_zeros(len(stored), q.shape[1], width) for _ in range(2))
        keys[..., : spec.nope_dim] = torch.bmm(by_head, key_up.mT).transpose(0, 1)
        keys[..., spec.nope_dim : spec.query_dim] = rotated[:, None]
        values[..., : spec.value_dim] = torch.bmm(by_head, value_up.mT).transpose(0, 1)
        inputs = PagedAttentionInputs(
            F.pad(q, (0, width - spec.query_dim)),
            keys[:, :, None],
            values[:, :, None],
            prompts.block_tables,
            step.query_start,
            prompts.context_lens,
            step.max_query,
            prompts.max_keys,
            spec.scale,
        )
        out = step.ops.paged_attention(inputs).view(len(q), -1, width)
        return out[..., : spec.value_dim].flatten(1)

    def _read_cached_latents(
        self, dtype: torch.dtype, step: Step, prompts: LatentExpansionPlan
    ) -> torch.Tensor:
        """What the cache holds of the tokens that are expanded [K, cached_dim]."""
        page, offset = prompts.page, prompts.offset
        rows = step.kv.k[self.cache_index][page, 0, offset]
        scale = step.kv.scales(self.cache_index)[0]
        if scale is not None:
            rows = rows.float() * scale[page, 0, offset][:, None]
        return rows.to(dtype)

    def attend_absorbed(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of any sequences, to the latent vectors as they are in the cache."""
        spec, (key_up, value_up) = self.spec, self.packed_up_projections()
        nope, rotated = q.split([spec.nope_dim, spec.rope_dim], -1)
        # the product has no name: it would be kept beside its copy, of long prompts a gigabyte
        queries = torch.cat((torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1), rotated), -1)
        pages = step.kv.k[self.cache_index]
        inputs = PagedAttentionInputs(
            queries,
            pages,
            pages,
            step.block_tables,
            step.query_start,
            step.context_lens,
            step.max_query,
            step.max_context,
            spec.scale,
            None,
            *step.kv.scales(self.cache_index),
            value_dim=spec.rank,
        )
        latent = self._op(step.ops.paged_attention, inputs).view(len(q), -1, spec.rank)
        return torch.bmm(latent.transpose(0, 1), value_up.mT).transpose(0, 1).flatten(1)

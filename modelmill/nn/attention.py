"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.attention_module_specs import (
    attention_core_spec,
    input_projection_spec,
    o_proj_spec,
)
from modelmill.nn.layer_spec import (
    ROPE_VALUE_NAME,
    LinearRowBlock,
    ModuleSpec,
    QuantSiteSpec,
    RopeCacheSpec,
    ScaleFoldRows,
)
from modelmill.nn.linear import Linear
from modelmill.nn.norm import QKNormWeight
from modelmill.nn.partition import HeadGroups, HeadPartition
from modelmill.nn.qkv_norm import QKNormConfig
from modelmill.nn.rope_before_qk_norm import QK_ROPE_SPEC, QKRope
from modelmill.nn.step import Step
from modelmill.nn.sub_norm import SubNorm, sub_norm_spec
from modelmill.nn.value_norm import VALUE_NORM_SPEC, ValueNormConfig
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.score_mods import ScoreMods
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class RopeCosSin:
    """The rotation of one step, computed once for all layers.

    Attributes:
        cos, sin: [T, D/2] float32, or None where nothing rotates.
        q_scale: [T], Qwen v1's logn factors, or None.
        local: The rotation of layers with a window, where that is another one.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    local: RopeCosSin | None = None

    def slice_first_tokens(self, count: int) -> RopeCosSin:
        """The rotation of the step's first tokens."""
        cos, sin, q_scale = (
            None if each is None else each[:count] for each in (self.cos, self.sin, self.q_scale)
        )
        local = None if self.local is None else self.local.slice_first_tokens(count)
        return RopeCosSin(cos, sin, q_scale, local)


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and switches of one layer's attention.

    Attributes:
        qk_norm: RMSNorm of each head of q and k, inside the op ``rope_cache`` (Qwen3).
        window: Tokens of the sliding window, or None.
        scale: Factor of the scores; None: 1 / √head_dim.
        rotates: Whether q and k are rotated; otherwise they are only stored.
        qkv_norm: A norm of q and k of another kind, before the rotation.
        local_rope: Whether it takes the rotation of layers with a window.
        gated: Whether each channel of the output is multiplied by the sigmoid of a projection of
            the input (arXiv:2505.06708).
        head_gates: Whether that projection has one number for all channels of a head (LFM3).
        gate_bias: Whether it has a bias; None: as that of q, k and v.
        softcap: Bound that the scores approach (Gemma 2), or None.
        alibi: A bias by distance, or None.
        sinks: Whether softmax has a learned logit per head beside the keys' (gpt-oss).
        qkv_clip: Bound of the absolute values of q, k and v (MPT), or None.
        value_norm: A norm of each head of v (Gemma 4), or None.
        rotates_first: Whether the rotation stands in front of ``qk_norm`` (Hunyuan).
        out_norm: Whether a norm stands in front of the output projection (BitNet b1.58).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    window: int | None = None
    scale: float | None = None
    rotates: bool = True
    qkv_norm: QKNormConfig | None = None
    local_rope: bool = False
    gated: bool = False
    softcap: float | None = None
    alibi: AlibiConfig | None = None
    sinks: bool = False
    qkv_clip: float | None = None
    value_norm: ValueNormConfig | None = None
    rotates_first: bool = False
    out_norm: bool = False
    head_gates: bool = False
    gate_bias: bool | None = None

    @property
    def gate_width(self) -> int:
        """How many gates a token has."""
        return self.heads if self.head_gates else self.heads * self.head_dim

    @property
    def has_gate_bias(self) -> bool:
        """Whether the projection to the gates has a bias."""
        return self.qkv_bias if self.gate_bias is None else self.gate_bias

    @property
    def modifies_scores(self) -> bool:
        """Whether more is done to the scores than to scale and mask them."""
        return self.softcap is not None or self.alibi is not None or self.sinks

    @property
    def values_are_keys(self) -> bool:
        """Whether there is no projection of v: it is that of k, normed in its own way."""
        return self.value_norm is not None and self.value_norm.from_keys

    @property
    def head_groups(self) -> HeadGroups:
        """The query heads, and the KV heads that they read."""
        return HeadGroups(self.heads, self.kv_heads, self.head_dim)

    @property
    def partition(self) -> HeadPartition:
        """How ranks divide the heads."""
        return HeadPartition("attn", self.head_groups)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the two projections."""
        # v is not linear in its rows where it is clipped or normed
        is_linear = self.qkv_clip is None and self.value_norm is None and not self.out_norm
        producer = ScaleFoldRows("attn.qkv_proj", "v", self.head_groups)
        return QuantSiteSpec("qkv"), QuantSiteSpec("o", producer if is_linear else None)

    def build_module(self, cache_index: int) -> Attention:
        """The module; ``cache_index``: its place among the layers with a KV cache."""
        return Attention(self, cache_index)

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules of ``Attention`` as a layer's ``attn``; "attn_input" → "attn_out"."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows: tuple[LinearRowBlock, ...] = (
            LinearRowBlock("q", q, "q_heads"),
            LinearRowBlock("k", kv, "kv_heads"),
        )
        normed = self.qkv_norm is not None or self.value_norm is not None
        clipped = self.qkv_clip is not None
        steps = [self.qkv_norm or self.qkv_clip, self.value_norm, self.rotates_first or None]
        assert steps.count(None) > 1, "no family has two of them"
        output = OUT_NORM_SPEC.writes[0] if self.out_norm else "attn"
        output = "gated_attn" if self.gated else output
        unclipped = "qkv_normed" if normed else "qkv"
        source = "qkv_clipped" if clipped else unclipped
        changes = self.rotates or self.qk_norm or self.qkv_norm is not None
        keys = "k_rot" if changes else "k_clipped" if clipped else "k"
        values = "v_clipped" if clipped else "v" if self.value_norm is None else "v_normed"
        rows += () if self.values_are_keys else (LinearRowBlock("v", kv, "kv_heads"),)
        return (
            input_projection_spec("qkv_proj", "qkv", rows, bias=self.qkv_bias),
            *(output_gate_projection_specs(self) if self.gated else ()),
            *(() if self.qkv_norm is None else (self.qkv_norm.module_spec,)),
            *(() if self.value_norm is None else (VALUE_NORM_SPEC,)),
            *((replace(QKV_CLIP_SPEC, reads=(unclipped,)),) if clipped else ()),
            *((QK_ROPE_SPEC,) if self.rotates_first else ()),
            RopeCacheSpec(
                path="attn.rope_cache",
                reads=("qkv_rotated" if self.rotates_first else source, ROPE_VALUE_NAME),
                writes=("q",),
                reference=("q_rot" if changes else "q_clipped" if clipped else "q",),
                cache_reference=(keys, values),
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                arithmetic="rotary" if changes else "residual",
                tensors=("q_norm.weight", "k_norm.weight") if self.qk_norm else (),
                window=self.window,
            ),
            attention_core_spec(("sinks",) if self.sinks else ()),
            *(OUTPUT_GATE_SPECS if self.gated else ()),
            *((OUT_NORM_SPEC,) if self.out_norm else ()),
            o_proj_spec(
                self.hidden,
                reads=output,
                split_columns="q_heads",
                bias=self.out_bias,
            ),
        )


def output_gate_projection_specs(spec: AttentionSpec) -> tuple[ModuleSpec, ...]:
    """The projection to the gates of an attention's output."""
    rows = LinearRowBlock(
        "attn_gate", spec.gate_width, "head_gates" if spec.head_gates else "q_heads"
    )
    return (input_projection_spec("gate_proj", "attn_gate", (rows,), bias=spec.has_gate_bias),)


OUTPUT_GATE_SPECS = (
    ModuleSpec(
        path="attn.output_gate", reads=("attn", "attn_gate"), writes=("gated_attn",),
        reference=("gated_attn",), op="sigmoid_mul",
    ),
)  # fmt: skip


class OutputGate(nn.Module):
    """The attention's output [T, heads·D] times sigmoid(gate), [T, heads·D] or [T, heads]."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor, step: Step) -> torch.Tensor:
        """Gate each channel, by itself or with those of its head."""
        channels = x.shape[1] // gate.shape[1]
        if channels > 1:
            gate = gate.repeat_interleave(channels, 1)
        return step.ops.sigmoid_mul(x, gate)


OUT_NORM_SPEC = sub_norm_spec("attn.out_norm", "attn", "attn_sub_norm")

QKV_CLIP_SPEC = ModuleSpec(
    path="attn.qkv_clip",
    reads=("qkv",),
    writes=("qkv_clipped",),
    reference=("q_clipped", "k_clipped", "v_clipped"),
    op="clamp",
)


class QKVClip(nn.Module):
    """q, k and v bounded to [−bound, bound]."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, (heads + 2·kv_heads)·D] → the same shape."""
        return qkv.clamp(-self.bound, self.bound)


class Attention(nn.Module):
    """qkv projection → (norm of q and k) → rotate and store → attend → output projection."""

    def __init__(self, spec: AttentionSpec, cache_index: int) -> None:
        """Make the modules; ``cache_index``: its place among the layers with a KV cache."""
        super().__init__()
        self.spec = spec
        self.kv_heads = spec.kv_heads
        kv_parts = 1 if spec.values_are_keys else 2
        width = (spec.heads + kv_parts * spec.kv_heads) * spec.head_dim
        self.qkv_proj = Linear(spec.hidden, width, spec.qkv_bias)
        if spec.value_norm is not None:
            self.value_norm = spec.value_norm.build_module(spec.head_groups)
        if spec.qkv_norm is not None:
            self.qkv_norm = spec.qkv_norm.build_module(spec.head_groups)
        self.qkv_clip = None if spec.qkv_clip is None else QKVClip(spec.qkv_clip)
        if spec.rotates_first:
            self.rotation = QKRope(spec.head_groups)
        self.rope_cache = RopeAndCache(spec, cache_index)
        self.core = AttentionCore(spec, cache_index)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, spec.out_bias)
        if spec.out_norm:
            self.out_norm = SubNorm(spec.heads * spec.head_dim, spec.eps)
        if spec.gated:
            self.gate_proj = Linear(spec.hidden, spec.gate_width, spec.has_gate_bias)
            self.output_gate = OutputGate()

    def forward(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        qkv = self.qkv_proj(x, step)
        if self.spec.qkv_norm is not None:
            qkv = self.qkv_norm(qkv, step)
        if self.qkv_clip is not None:
            qkv = self.qkv_clip(qkv, step)
        if self.spec.value_norm is not None:
            qkv = self.value_norm(qkv, step)
        if self.spec.rotates_first:
            qkv = self.rotation(qkv, rope, step)
        q = self.rope_cache(qkv, rope, step)
        out = self.core(q, step)
        if self.spec.gated:
            out = self.output_gate(out, self.gate_proj(x, step), step)
        if self.spec.out_norm:
            out = self.out_norm(out, step)
        return self.o_proj(out, step)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads; ``forward`` then returns a partial sum."""
        if self.spec.out_norm:
            dim = self.spec.head_dim
            self.out_norm.keep_local_channels((heads[0] * dim, heads[1] * dim))
        self.rope_cache.keep_local_heads(heads[1] - heads[0])
        self.core.keep_local_heads(heads)
        if self.spec.qkv_norm is not None:
            self.qkv_norm.keep_local_heads(heads, kv_heads)
        if self.spec.value_norm is not None:
            self.value_norm.keep_local_heads(heads, kv_heads)
        self.kv_heads = kv_heads[1] - kv_heads[0]
        if self.spec.rotates_first:
            self.rotation.keep_local_kv_heads(self.kv_heads)


class RopeAndCache(nn.Module):
    """Splits qkv, norms and rotates q and k, writes k and v to their slots, returns q."""

    def __init__(self, spec: AttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.cache_index = cache_index
        self.eps = spec.eps
        self.rotates = spec.rotates and not spec.rotates_first
        self.local_rope = spec.local_rope
        self._op = CachedOpBinding()
        self.q_norm = QKNormWeight(spec.head_dim) if spec.qk_norm else None
        self.k_norm = QKNormWeight(spec.head_dim) if spec.qk_norm else None

    def forward(self, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, (heads + 2·kv_heads)·D] → q [T, heads, D]."""
        return self._op(step.ops.rope_cache, qkv, self.op_inputs(rope, step))

    def keep_local_heads(self, count: int) -> None:
        """Keep a rank's heads, so many of queries."""
        self.heads = count

    def op_inputs(self, rope: RopeCosSin, step: Step) -> RopeCacheInputs:
        """The inputs of the op ``rope_cache`` beside qkv."""
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        if self.local_rope and rope.local is not None:
            rope = rope.local
        return RopeCacheInputs(
            step.kv.k[self.cache_index],
            step.kv.v[self.cache_index],
            step.slots,
            self.heads,
            rope.cos if self.rotates else None,
            rope.sin if self.rotates else None,
            rope.q_scale,
            q_norm,
            k_norm,
            self.eps,
            *step.kv.scales(self.cache_index),
        )


class AttentionCore(nn.Module):
    """Attention of each query over its sequence's pages.

    Sinks and slopes are those of all heads, also on a rank that computes some of them.
    """

    sinks: torch.Tensor | None

    def __init__(self, spec: AttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.cache_index = cache_index
        self.window = spec.window
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.heads: Range = (0, spec.heads)
        sinks = torch.empty(spec.heads, device="meta") if spec.sinks else None
        self.register_buffer("sinks", sinks)
        self.softcap = spec.softcap
        self.slopes = None if spec.alibi is None else spec.alibi.slopes(spec.heads)
        self._modifies_scores = spec.modifies_scores
        self._mods: tuple[torch.Tensor | None, torch.device, ScoreMods] | None = None
        self._op = CachedOpBinding()

    def forward(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, D] → [T, heads·D]."""
        inputs = PagedAttentionInputs(
            q,
            step.kv.k[self.cache_index],
            step.kv.v[self.cache_index],
            step.block_tables,
            step.query_start,
            step.context_lens,
            step.max_query,
            step.max_context,
            self.scale,
            self.window,
            *step.kv.scales(self.cache_index),
            self._score_mods(q.device) if self._modifies_scores else None,
        )
        return self._op(step.ops.paged_attention, inputs)

    @property
    def modifies_scores(self) -> bool:
        """Whether more is done to the scores than to scale and mask them."""
        return self._modifies_scores

    def keep_local_heads(self, heads: Range) -> None:
        """Keep a rank's heads."""
        self.heads = heads

    def _score_mods(self, device: torch.device) -> ScoreMods:
        """The rank's soft cap, slopes and sinks; the same object in each call."""
        if self._mods is None or self._mods[0] is not self.sinks or self._mods[1] != device:
            first, end = self.heads
            slopes = sinks = None
            if self.slopes is not None:
                slopes = torch.tensor(self.slopes[first:end], device=device)
            if self.sinks is not None:
                sinks = self.sinks[first:end].float()
            mods = ScoreMods(self.softcap, slopes, sinks)
            self._mods = self.sinks, device, mods
        return self._mods[2]

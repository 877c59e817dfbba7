"""Norms of q and k before the rotation that are not an RMSNorm of each head with one weight.

* ``ALL_HEADS_RMS_NORM`` (OLMo 2): an RMSNorm over all heads of q together, another over all of k;
* ``PER_HEAD_LAYER_NORM`` (StableLM 2): a LayerNorm of each head, each with a weight of its own;
* ``SHARED_HEAD_LAYER_NORM`` (Phi): a LayerNorm of each head, all heads with one weight and bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.layer_spec import NormSpec
from modelmill.nn.partition import HeadGroups
from modelmill.nn.step import Step
from modelmill.parallel.shard import Range

ALL_HEADS_RMS_NORM = "wide_rms"
PER_HEAD_LAYER_NORM = "head_layer_norm"
SHARED_HEAD_LAYER_NORM = "shared_layer_norm"


@dataclass(frozen=True)
class QKNormConfig:
    """The kind and epsilon of the norms of q and k."""

    kind: str
    eps: float

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of both norms: q's values, then k's."""
        return ("weight", "bias") if self.kind == SHARED_HEAD_LAYER_NORM else ("weight",)

    @property
    def module_spec(self) -> NormSpec:
        """What a layer declares of it: v passes through."""
        return NormSpec(
            path="attn.qkv_norm",
            reads=("qkv",),
            writes=("qkv_normed",),
            reference=("qk_norm", "v"),
            tensors=self.tensor_names,
            op="rms_norm" if self.kind == ALL_HEADS_RMS_NORM else "layer_norm",
        )

    def build_module(self, groups: HeadGroups) -> QKNorm:
        """The module for these heads."""
        return (
            AllHeadsQKNorm(self, groups)
            if self.kind == ALL_HEADS_RMS_NORM
            else PerHeadQKLayerNorm(self, groups)
        )


class QKNorm(nn.Module):
    """qkv [T, (heads + 2·kv_heads)·D] with q and k normed.

    The weight has the values of all heads, also on a rank that computes some of them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, config: QKNormConfig, groups: HeadGroups) -> None:
        super().__init__()
        self.eps = config.eps
        self.groups = groups
        self.q_heads: Range = (0, groups.q_heads)
        self.kv_heads: Range = (0, groups.kv_heads)
        rows = 2 if config.kind == SHARED_HEAD_LAYER_NORM else groups.q_heads + groups.kv_heads
        self.shared = config.kind == SHARED_HEAD_LAYER_NORM
        size = rows * groups.head_dim
        self.register_buffer("weight", torch.empty(size, device="meta"))
        has_bias = "bias" in config.tensor_names
        self.register_buffer("bias", torch.empty(size, device="meta") if has_bias else None)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads."""
        self.q_heads, self.kv_heads = heads, kv_heads

    def split_qk_heads_and_v(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads of q and k together [T, heads + kv_heads, D], and v [T, kv_heads·D]."""
        dim = self.groups.head_dim
        v_width = (self.kv_heads[1] - self.kv_heads[0]) * dim
        heads = qkv[:, : qkv.shape[1] - v_width]
        return heads.view(len(qkv), -1, dim), qkv[:, qkv.shape[1] - v_width :]

    def select_local_head_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Of a weight or bias, the rows of this rank's heads of q and k, [heads + kv_heads, D]."""
        rows = values.view(-1, self.groups.head_dim)
        (q0, q1), (k0, k1) = self.q_heads, self.kv_heads
        if self.shared:
            return torch.cat((rows[:1].expand(q1 - q0, -1), rows[1:].expand(k1 - k0, -1)))
        first_k = self.groups.q_heads
        return torch.cat((rows[q0:q1], rows[first_k + k0 : first_k + k1]))


class AllHeadsQKNorm(QKNorm):
    """RMSNorm over all heads of q, and over all heads of k; ranks add up their squares."""

    def __init__(self, config: QKNormConfig, groups: HeadGroups) -> None:
        super().__init__(config, groups)
        self._ranks_per_kv_head: torch.Tensor | None = None

    def forward(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """Norm q and k; v is unchanged."""
        heads, v = self.split_qk_heads_and_v(qkv)
        count = self.q_heads[1] - self.q_heads[0]
        q, k = heads[:, :count].flatten(1), heads[:, count:].flatten(1)
        if step.tp_group.size > 1:
            q, k = self._norm_over_ranks(heads, count, step)
        else:
            q_weight, k_weight = self.weight.split([q.shape[1], k.shape[1]])
            q = step.ops.rms_norm(q.contiguous(), q_weight, self.eps)
            k = step.ops.rms_norm(k.contiguous(), k_weight, self.eps)
        return torch.cat((q, k, v), -1)

    def _norm_over_ranks(
        self, heads: torch.Tensor, count: int, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm a rank's heads by the mean squares of all ranks' heads."""
        first, end = self.kv_heads
        own = heads.float().square().sum(-1)
        sums = own.new_zeros(len(own), 1 + self.groups.kv_heads)
        sums[:, 0], sums[:, 1 + first : 1 + end] = own[:, :count].sum(1), own[:, count:]
        if self._ranks_per_kv_head is None:  # several ranks may have the same KV head
            shares = sums.new_zeros(1, self.groups.kv_heads)
            shares[:, first:end] = 1
            self._ranks_per_kv_head = step.tp_group.all_reduce(shares)
        sums = step.tp_group.all_reduce(sums, captured=step.is_graph_capturable)
        dim = self.groups.head_dim
        q_mean = sums[:, 0] / (self.groups.q_heads * dim)
        k_mean = (sums[:, 1:] / self._ranks_per_kv_head).sum(1) / (self.groups.kv_heads * dim)
        q_scale, k_scale = (torch.rsqrt(mean + self.eps)[:, None] for mean in (q_mean, k_mean))
        scale = torch.cat(
            (q_scale.expand(-1, count), k_scale.expand(-1, heads.shape[1] - count)), 1
        )
        normed = (heads.float() * scale[..., None]).to(heads.dtype) * self.select_local_head_rows(
            self.weight
        )
        return normed[:, :count].flatten(1), normed[:, count:].flatten(1)


class PerHeadQKLayerNorm(QKNorm):
    """LayerNorm of each head of q and k; statistics in float32."""

    def forward(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """Norm q and k; v is unchanged."""
        heads, v = self.split_qk_heads_and_v(qkv)
        x = heads.float()
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        normed = (
            centred
            * torch.rsqrt(variance + self.eps)
            * self.select_local_head_rows(self.weight).float()
        )
        if self.bias is not None:
            normed = normed + self.select_local_head_rows(self.bias).float()
        return torch.cat((normed.to(qkv.dtype).flatten(1), v), -1)

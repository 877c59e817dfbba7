"""A norm of the values of each head, without a weight (Gemma 4).

Where keys and values have one projection, the values are its output as well, normed in their own
way and not rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.layer_spec import NormSpec
from modelmill.nn.partition import HeadGroups
from modelmill.nn.step import Step
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.parallel.shard import Range

VALUE_NORM_SPEC = NormSpec(
    path="attn.value_norm",
    reads=("qkv",),
    writes=("qkv_normed",),
    reference=("value_norm",),
    tensors=(),
    op="rms_norm",
)


@dataclass(frozen=True)
class ValueNormConfig:
    """The epsilon of the norm; from_keys: whether the values are the projection of the keys."""

    eps: float
    from_keys: bool = False

    def build_module(self, groups: HeadGroups) -> ValueNorm:
        """The module for these heads."""
        return ValueNorm(self, groups)


class ValueNorm(nn.Module):
    """q, k and v [T, (heads + 2·kv_heads)·D] of qkv, with v normed; q and k pass through."""

    def __init__(self, config: ValueNormConfig, groups: HeadGroups) -> None:
        super().__init__()
        self.config, self.head_dim, self.kv_heads = config, groups.head_dim, groups.kv_heads
        self._norm = CachedOpBinding()
        self._ones: torch.Tensor | None = None

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:  # noqa: ARG002
        """Keep a rank's heads."""
        self.kv_heads = kv_heads[1] - kv_heads[0]

    def forward(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, (heads + 2·kv_heads)·D], or without the rows of v where they are those of k."""
        width = self.kv_heads * self.head_dim
        passed = qkv if self.config.from_keys else qkv[:, :-width]
        heads = qkv[:, -width:].reshape(-1, self.head_dim)
        normed = self._norm(step.ops.rms_norm, heads, self._unit_weight(qkv), self.config.eps)
        return torch.cat((passed, normed.view(len(qkv), width)), -1)

    def _unit_weight(self, like: torch.Tensor) -> torch.Tensor:
        """The weight that the op needs: ones, made once."""
        ones = self._ones
        if ones is None or ones.device != like.device or ones.dtype != like.dtype:
            self._ones = ones = torch.ones(self.head_dim, dtype=like.dtype, device=like.device)
        return ones

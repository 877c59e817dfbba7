"""Norms: each adds a branch to the residual stream, normalises the sum and returns both.

With tensor parallelism every rank has a partial sum of the branch: the norm is where it is
all-reduced. A norm behind a branch that was all-reduced before does not reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from modelmill.nn.layer_spec import NormSpec
from modelmill.nn.step import Step
from modelmill.ops.bound_op import CachedOpBinding


class RMSNorm(nn.Module):
    """(x, residual) → (normed, new residual); residual None starts the stream."""

    weight: torch.Tensor

    def __init__(self, width: int, eps: float, *, reduces: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self._norm, self._add_norm = CachedOpBinding(), CachedOpBinding()
        self.reduces = reduces
        self.register_buffer("weight", torch.empty(width, device="meta"))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H]."""
        if residual is None:
            return self._norm(step.ops.rms_norm, x, self.weight, self.eps), x
        if not self.reduces:
            return self._add_norm(step.ops.add_rms_norm, x, residual, self.weight, self.eps)
        return step.tp_group.all_reduce_add_rms_norm(
            partial(self._add_norm, step.ops.add_rms_norm),
            x,
            residual,
            self.weight,
            self.eps,
            captured=step.is_graph_capturable,
        )


class AffineNorm(nn.Module):
    """The weights of a norm with mean and bias; a subclass says how it runs."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._norm, self._add_norm = CachedOpBinding(), CachedOpBinding()
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta"))


class ReducingNormBase(nn.Module):
    """The weights of a norm of the residual stream, with or without a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, width: int, eps: float, *, bias: bool, reduces: bool) -> None:
        super().__init__()
        self.eps = eps
        self.reduces = reduces
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta") if bias else None)
        self._norm = CachedOpBinding()
        self._zeros: torch.Tensor | None = None

    def layer_norm(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """LayerNorm of [T, H]; without a bias the op gets zeros, which are made once."""
        bias = self.bias
        if bias is None:
            if self._zeros is None or self._zeros.device != self.weight.device:
                self._zeros = torch.zeros_like(self.weight)
            bias = self._zeros
        return self._norm(step.ops.layer_norm, x, self.weight, bias, self.eps)


class LayerNorm(ReducingNormBase):
    """(x, residual) → (normed, new residual), with mean and, if it has one, bias."""

    def __init__(self, width: int, eps: float, *, bias: bool = True, reduces: bool = True) -> None:
        super().__init__(width, eps, bias=bias, reduces=reduces)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H]."""
        if residual is None:
            total = x
        elif self.reduces:
            total = step.tp_group.all_reduce(x, captured=step.is_graph_capturable) + residual
        else:
            total = x + residual
        return self.layer_norm(total, step), total


class NormWithoutResidual(ReducingNormBase):
    """A norm of one value, [T, H] → [T, H], without a residual.

    Of a branch (``reduces``), it adds up the ranks' partial sums first.
    """

    def __init__(self, config: NormConfig, *, reduces: bool) -> None:
        has_bias = config.kind == LAYER_NORM
        super().__init__(config.width, config.eps, bias=has_bias, reduces=reduces)
        self.is_rms = config.kind == RMS_NORM

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [T, H]."""
        if self.reduces:
            x = step.tp_group.all_reduce(x, captured=step.is_graph_capturable)
        if self.is_rms:
            return self._norm(step.ops.rms_norm, x, self.weight, self.eps)
        return self.layer_norm(x, step)


class ResidualAdd(nn.Module):
    """(x, residual) → their sum, the residual stream; residual None starts it."""

    def __init__(self, *, reduces: bool) -> None:
        super().__init__()
        self.reduces = reduces

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> torch.Tensor:
        """x, residual: [T, H]."""
        if residual is None:
            return x
        if self.reduces:
            x = step.tp_group.all_reduce(x, captured=step.is_graph_capturable)
        return x + residual


class QKNormWeight(nn.Module):
    """The weight of a norm over one head (Qwen3's q and k); applied inside the rope_cache op."""

    weight: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(dim, device="meta"))


RMS_NORM, LAYER_NORM, LAYER_NORM_WITHOUT_BIAS = "rms_norm", "layer_norm", "layer_norm_without_bias"


@dataclass(frozen=True)
class NormConfig:
    """The norms of a model: one width, epsilon and kind (RMS_NORM, LAYER_NORM, …)."""

    width: int
    eps: float
    kind: str = RMS_NORM

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of each norm."""
        return ("weight", "bias") if self.kind == LAYER_NORM else ("weight",)

    def build_module(self, *, reduces: bool = True) -> RMSNorm | LayerNorm:
        """A norm of branch and residual."""
        if self.kind == RMS_NORM:
            return RMSNorm(self.width, self.eps, reduces=reduces)
        return LayerNorm(self.width, self.eps, bias=self.kind == LAYER_NORM, reduces=reduces)

    def build_norm_without_residual(self, *, reduces: bool = False) -> NormWithoutResidual:
        """A norm of one value."""
        return NormWithoutResidual(self, reduces=reduces)

    def make_module_spec(
        self,
        path: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        reference: str,
        stream_reference: str = "",
    ) -> NormSpec:
        """What a layer declares of one of its norms."""
        op = "rms_norm" if len(reads) == 1 else "add_rms_norm"
        return NormSpec(
            path=path,
            reads=reads,
            writes=writes,
            reference=(reference,),
            stream_reference=stream_reference,
            tensors=self.tensor_names,
            op=op if self.kind == RMS_NORM else "layer_norm",
        )

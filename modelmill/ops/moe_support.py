"""The range of a kernel for the experts of a mixture as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_moe import FusedMoEInputs, moe_cost
from modelmill.ops.kernel_support import KernelSupportRange


class MoEProblem(NamedTuple):
    """Sizes and dtypes of the grouped products of a mixture of experts.

    Attributes:
        m: tokens; 0 if x is no matrix.
        top_k: experts of a token.
        experts: that this rank has.
        global_num_experts: of how many the tokens choose.
        hidden: columns of x.
        inner: columns between the products.
        dtype: of x.
        weight_dtype: of both weights; None where they differ.
        scale_dtype: of their scales, or None.
        group: columns that share a scale; 0 where a row has one, or none.
        offset: whether the groups have offsets.
        bias: whether there are biases.
        gated: whether experts have a gate.
        device: index of the GPU; −1 on the CPU.
    """

    m: int
    top_k: int
    experts: int
    global_num_experts: int
    hidden: int
    inner: int
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    scale_dtype: torch.dtype | None = None
    group: int = 0
    offset: bool = False
    bias: bool = False
    gated: bool = True
    device: int = -1

    @property
    def pairs_per_expert(self) -> float:
        """Pairs of a token and an expert, for each expert on average."""
        return self.m * self.top_k / self.global_num_experts


def make_moe_problem(*operands: Any) -> MoEProblem:
    """The problem of an op's inputs, one by one (``FusedMoEInputs``)."""
    inputs = FusedMoEInputs(*operands)
    x, gate_up, down, scale = inputs.x, inputs.gate_up, inputs.down, inputs.gate_up_scale
    same_dtype = gate_up.dtype == down.dtype
    same_scales = scale is not None and _dtype(inputs.down_scale) == scale.dtype
    return MoEProblem(
        x.shape[0] if x.dim() == 2 else 0,
        inputs.topk_ids.shape[1],
        gate_up.shape[0],
        inputs.num_experts,
        x.shape[-1],
        inputs.inner_size,
        x.dtype,
        gate_up.dtype if same_dtype else None,
        scale.dtype if scale is not None and same_scales else None,
        inputs.group,
        inputs.gate_up_offset is not None,
        inputs.gate_up_bias is not None,
        inputs.is_gated,
        x.get_device(),
    )


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@dataclass(frozen=True, kw_only=True)
class MoESupportRange(KernelSupportRange):
    """Mixtures that a kernel serves.

    Attributes:
        dtypes: of x; () means any.
        weight_dtype: None means any.
        scale_dtypes: () means any.
        max_pairs_per_expert: pairs of a token and an expert up to which it is the fastest, for each
            expert on average. It depends on the exact number of rows within ``m``, which a binding
            does not look at: these ops have none (``guard=None``).
        offset: whether groups may have offsets.
        ungated: whether experts may have no gate.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    weight_dtype: torch.dtype | None = None
    scale_dtypes: tuple[torch.dtype, ...] = ()
    max_pairs_per_expert: float = float("inf")
    offset: bool = True
    ungated: bool = True

    def covers(self, problem: MoEProblem) -> bool:
        """Whether the kernel serves this problem."""
        return problem.pairs_per_expert <= self.max_pairs_per_expert and super().covers(problem)

    def covers_ignoring_m(self, problem: MoEProblem) -> bool:
        """Whether it serves these weights with some number of tokens in ``m``."""
        return (
            (not self.dtypes or problem.dtype in self.dtypes)
            and self.weight_dtype in (None, problem.weight_dtype)
            and (not self.scale_dtypes or problem.scale_dtype in self.scale_dtypes)
            and (self.offset or not problem.offset)
            and (self.ungated or problem.gated)
            and super().covers_ignoring_m(problem)
        )


def declare_moe_with_ranges() -> OpDeclaration:
    """The declaration of an op whose kernels have a ``MoESupportRange``."""
    return OpDeclaration(inputs=FusedMoEInputs, problem=make_moe_problem, guard=None, cost=moe_cost)

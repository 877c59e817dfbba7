"""The weights of a layer's experts, one after another in memory, for the fused MoE ops.

On a CPU they stay where they are, mostly in a mapped file, and are a stack where each expert's are
equally far from the last one's. Each expert stays a module with its own weight, whose tensors are
views of the stack: no memory is taken twice, and what walks over experts (acceptance, calibration,
reports) finds them as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from modelmill.nn.linear import Linear, weight_change_counter
from modelmill.nn.mlp import ClampedSwiglu, GatedActivation, Relu2, SiluMul
from modelmill.nn.moe import Expert, ExpertMLP, MoE
from modelmill.ops.fused_moe import (
    GELU_TANH,
    MAX_DEQUANTIZED_MEMORY_FRACTION,
    RELU2,
    SILU,
    FusedMoEInputs,
    SwigluOaiParams,
)
from modelmill.ops.registry import Ops, backend_serves_args
from modelmill.weights._groupwise import GroupwiseWeight
from modelmill.weights.base import WeightFormat
from modelmill.weights.w8a8 import W8A8Weight

FUSED_MOE_OPS = {
    "dense": "fused_moe",
    "int8": "int8_fused_moe",
    "int4": "int4_fused_moe",
    "w8a8": "w8a8_fused_moe",
    "fp8": "fp8_fused_moe",
    "mxfp4": "mxfp4_fused_moe",
}
"""The fused MoE op of each weight format that has one."""
DEQUANTIZING_OPS = ("int4_fused_moe", "mxfp4_fused_moe")
"""Write the experts out in 16 bits where they have many tokens."""
STACKED_TENSORS = ("weight", "scale", "offset")
"""Suffixes of the tensors that a fused MoE op reads."""
MAX_CPU_FUSED_MOE_TOKENS = 16
"""Tokens of a step up to which the CPU's fused MoE op is used: it multiplies them one by one."""


def fused_moe_op_name(weight: WeightFormat) -> str | None:
    """The op that multiplies with such weights, or None."""
    if isinstance(weight, W8A8Weight) and weight.float_input:
        return FUSED_MOE_OPS["int8"] if weight.format == "w8a8" else None
    static = isinstance(weight, W8A8Weight) and weight.inv_input_scale is not None
    has_perm = "perm" in weight.tensors()
    return fused_moe_op_of_format(weight.format, has_static_scale=static, has_perm=has_perm)


def fused_moe_op_of_format(
    weight_format: str, *, has_static_scale: bool = False, has_perm: bool = False
) -> str | None:
    """The op that multiplies with weights of a format.

    None where no op does, as for the static ranges of single experts' inputs.

    Args:
        weight_format: Its name.
        has_static_scale: Whether inputs are rounded with a scale that calibration chose.
        has_perm: Whether columns are in another order.
    """
    return None if has_static_scale or has_perm else FUSED_MOE_OPS.get(weight_format)


def columns_per_scale(weight: WeightFormat) -> int:
    """Columns that share a scale; 0 for a scale per row, or none."""
    return weight.group_size if isinstance(weight, GroupwiseWeight) else 0


class ExpertActivation(NamedTuple):
    """What stands between the products of an expert, as ``FusedMoEInputs`` has it."""

    activation: str
    clamp: SwigluOaiParams | None = None


class StackedExperts:
    """The stacked weights of all experts, as operands of a fused MoE op.

    Attributes:
        op: its name.
    """

    def __init__(
        self,
        op: str,
        linears: tuple[Sequence[Linear], Sequence[Linear]],
        parts: Sequence[dict[str, torch.Tensor]],
        gate: ExpertActivation,
        global_num_experts: int | None = None,
    ) -> None:
        """Take what ``stack_experts`` made.

        Args:
            op: The fused MoE op.
            linears: Of both products, the experts' layers.
            parts: Their stacked tensors.
            gate: Between the products.
            global_num_experts: As in ``FusedMoEInputs``.
        """
        gate_up, down = linears
        self.op = op
        self._gate = gate
        self._global_num_experts = global_num_experts
        self._linears = (*gate_up, *down)
        self._served_on_cpu: dict[torch.dtype, bool] = {}
        self._checked_at = -1
        self._operands: dict[str, Any] = {
            name + ("" if suffix == "weight" else f"_{suffix}"): tensor
            for name, tensors in zip(("gate_up", "down"), parts, strict=True)
            for suffix, tensor in tensors.items()
        }
        for name, layers in (("gate_up", gate_up), ("down", down)):
            biases = [linear.bias for linear in layers if linear.bias is not None]
            if biases:
                self._operands[f"{name}_bias"] = torch.stack(biases)
        self._group = columns_per_scale(gate_up[0].weight)
        self._weights = [linear.weight for linear in self._linears]

    def is_fused_moe_op_usable(self, x: torch.Tensor, ops: Ops) -> bool:
        """Whether a backend has the op for x [T, H], and no expert got another weight since."""
        if x.device.type == "cpu" and not self._is_cpu_kernel_usable(x, ops):
            return False
        # float16 may not hold the values of MXFP4, which many tokens need in x's dtype
        if ops.backends[self.op] == "torch" or (
            self.op == FUSED_MOE_OPS["mxfp4"] and x.dtype == torch.float16 and len(x) > 1
        ):
            return False
        return self._checked_at == weight_change_counter.count or self._are_weights_unchanged()

    def _are_weights_unchanged(self) -> bool:
        """Whether no expert got another weight; if one did, the fused op is checked again."""
        count = weight_change_counter.count
        same = all(map(is_, self._weights, [linear.weight for linear in self._linears]))
        if same:
            self._checked_at = count
        return same

    def _is_cpu_kernel_usable(self, x: torch.Tensor, ops: Ops) -> bool:
        """Whether the C++ kernel serves x; its reference would run every expert."""
        if ops.backends[self.op] != "cpu":
            return True
        served = self._served_on_cpu.get(x.dtype)
        if served is None:
            ids = torch.zeros(len(x), 1, dtype=torch.int32)
            served = backend_serves_args(
                self.op, "cpu", self._make_op_inputs(x.contiguous(), ids.float(), ids, None)
            )
            self._served_on_cpu[x.dtype] = served
        return served and x.is_contiguous() and len(x) <= MAX_CPU_FUSED_MOE_TOKENS

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared: torch.Tensor | None,
        ops: Ops,
    ) -> torch.Tensor:
        """The weighted sum [T, H] of each token's experts, and of ``shared`` [T, H]."""
        inputs = self._make_op_inputs(x, topk_weights, topk_ids, shared)
        return cast(torch.Tensor, getattr(ops, self.op)(inputs))

    def make_empty_op_inputs(self, x: torch.Tensor) -> FusedMoEInputs:
        """The op's inputs for no tokens of x's dtype [., H]."""
        ids = torch.empty(0, 1, dtype=torch.int32, device=x.device)
        return self._make_op_inputs(x[:0], ids.float(), ids, None)

    def _make_op_inputs(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> FusedMoEInputs:
        return FusedMoEInputs(
            x, topk_weights, topk_ids, shared=shared, group=self._group,
            activation=self._gate.activation, clamp=self._gate.clamp,
            global_num_experts=self._global_num_experts, **self._operands,
        )  # fmt: skip


def stack_experts(moe: MoE, *, in_place: bool = False) -> StackedExperts | None:
    """Move the weights of this rank's experts into stacks; None where no fused MoE op has them.

    in_place: not where tensors would have to be copied; their distances may be larger than they.
    """
    experts, total = moe.local_expert_modules, len(moe.experts)
    gate_up = [expert_gate_up_or_fc_proj(expert) for expert in experts]
    down = [expert.down_proj for expert in experts]
    op = fused_moe_op_name(gate_up[0].weight)
    gates = {expert_activation(expert.act) for expert in experts}
    # of ranks that share a product, one alone adds the second bias
    biased = [{linear.bias is not None for linear in linears} for linears in (gate_up, down)]
    kinds = {_stack_compatibility_key(linear.weight) for linear in (*gate_up, *down)}
    gate = gates.pop()
    if op is None or gate is None or gates or len(kinds) > 1 or max(map(len, biased)) > 1:
        return None
    if moe.router.weight.is_cuda and not has_gpu_fused_moe_kernel(op, gate):
        return None  # the reference would compute every expert
    gate_up_parts = stack_weights(gate_up, in_place=in_place)
    down_parts = stack_weights(down, in_place=in_place)
    if gate_up_parts is None or down_parts is None:
        return None
    stacks = (gate_up_parts, down_parts)
    elsewhere = total if len(experts) < total else None
    return StackedExperts(op, (gate_up, down), stacks, gate, elsewhere)


def expert_gate_up_or_fc_proj(expert: ExpertMLP) -> Linear:
    """An expert's gate and up in one, or its up alone."""
    return expert.gate_up_proj if isinstance(expert, Expert) else expert.fc_proj


def expert_linears(expert: ExpertMLP) -> tuple[Linear, Linear]:
    """Return both products of an expert."""
    return expert_gate_up_or_fc_proj(expert), expert.down_proj


def has_gpu_fused_moe_kernel(op: str, gate: ExpertActivation) -> bool:
    """Whether a kernel of a GPU computes a fused MoE op for experts with this activation."""
    return gate.activation != RELU2 or op not in DEQUANTIZING_OPS


def expert_activation(act: nn.Module) -> ExpertActivation | None:
    """The activation of the fused MoE ops that an expert's is, or None."""
    if isinstance(act, ClampedSwiglu):
        return ExpertActivation(SILU, act.clamp)
    if isinstance(act, SiluMul):
        return ExpertActivation(SILU)
    if isinstance(act, Relu2):
        return ExpertActivation(RELU2)
    is_gelu = isinstance(act, GatedActivation) and act.name == GELU_TANH
    return ExpertActivation(GELU_TANH) if is_gelu else None


def _stack_compatibility_key(weight: WeightFormat) -> tuple[object, ...]:
    """What the weights of a stack have in common: op, groups, tensors and their dtypes."""
    tensors = weight.tensors()
    dtypes = tuple((suffix, tensor.dtype) for suffix, tensor in sorted(tensors.items()))
    return (fused_moe_op_name(weight), columns_per_scale(weight), *dtypes)


def stack_weights(
    linears: Sequence[Linear], *, in_place: bool = False
) -> dict[str, torch.Tensor] | None:
    """[E, …] of each tensor that the weights store, by suffix; the weights become views of them.

    in_place: None where a tensor would have to be copied.
    """
    stacks = {}
    for suffix in (each for each in STACKED_TENSORS if each in linears[0].weight.tensors()):
        parts = [linear.weight.tensors()[suffix] for linear in linears]
        stack = as_strided_stack(parts, apart=in_place)
        if stack is None and in_place:
            return None
        if stack is None:
            stack = torch.stack(parts)
            for linear, view in zip(linears, stack, strict=True):
                # every format that has a fused MoE op is a dataclass with a field for each tensor
                linear.weight = replace(linear.weight, **{suffix: view})  # type: ignore[type-var]
        stacks[suffix] = stack
        del parts  # the former tensors are freed before the next ones are copied
    return stacks


def as_strided_stack(parts: Sequence[torch.Tensor], *, apart: bool = False) -> torch.Tensor | None:
    """The stack that tensors are the views of, in order; None if they are not.

    apart: there may be other data between them, of the same size everywhere.
    """
    first = parts[0]
    storage, size = first.untyped_storage().data_ptr(), first.numel()
    start = first.storage_offset()
    step = parts[1].storage_offset() - start if apart and len(parts) > 1 else size
    if step < size:
        return None
    for index, part in enumerate(parts):
        at = start + index * step
        alike = part.shape == first.shape and part.is_contiguous() and part.dtype == first.dtype
        if not alike or part.storage_offset() != at or part.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def largest_dequantized_experts_bytes(model: nn.Module, total_bytes: int) -> int:
    """Bytes that a layer's experts may take in 16 bits, once there are many tokens for each.

    Args:
        model: with its weights.
        total_bytes: of the GPU's memory.
    """
    largest = 0
    for moe in model.modules():
        experts = moe.local_expert_modules if isinstance(moe, MoE) else []
        first = experts[0] if experts else None
        if (
            isinstance(first, Expert)
            and fused_moe_op_name(first.gate_up_proj.weight) in DEQUANTIZING_OPS
        ):
            rows, columns = first.gate_up_proj.shape
            largest = max(largest, 2 * len(experts) * rows * columns)
    return largest if largest <= MAX_DEQUANTIZED_MEMORY_FRACTION * total_bytes else 0

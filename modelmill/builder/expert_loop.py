"""Says which experts a GPU computes one after another, for want of a fused MoE op.

They are right all the same: ``nn.fused_moe`` groups the tokens by expert, and in a CUDA graph, in
which nothing can wait for the router, every expert computes every token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from torch import nn

from modelmill.nn.expert_stack import (
    FUSED_MOE_OPS,
    expert_activation,
    expert_linears,
    fused_moe_op_of_format,
    has_gpu_fused_moe_kernel,
)
from modelmill.nn.moe import MoE

PER_TENSOR_ACTIVATION_SCALES = "tensor"
"""The option ``activation_scales`` of one static scale for all inputs of a matrix."""
STATIC_INPUT_SCALE_FORMATS = ("w8a8", "fp8")


def unfused_experts_remark(
    model: nn.Module,
    formats: Mapping[str, str],
    activation_scales: str | None,
    tensors: Collection[str],
) -> str | None:
    """What a GPU does with the experts that no fused MoE op computes; None: there are none.

    Args:
        model: The model; its weights are not read.
        formats: The weight format of each linear.
        activation_scales: As in the build's options.
        tensors: The names of the stored tensors.
    """
    why = partial(_no_fused_moe_reason, formats, activation_scales, tensors)
    found = [why(name, each) for name, each in model.named_modules() if isinstance(each, MoE)]
    reasons = dict.fromkeys(reason for reason in found if reason is not None)
    if not reasons:
        return None
    grouped, layers = found.count(None), len(found)
    where = f"in {layers - grouped} of {layers} layers " if grouped else ""
    return (
        f"{where}one after another: no fused MoE op has {'; '.join(reasons)}; a CUDA graph reads "
        "all of them for each token"
    )


def _no_fused_moe_reason(
    formats: Mapping[str, str],
    activation_scales: str | None,
    tensors: Collection[str],
    name: str,
    moe: MoE,
) -> str | None:
    """What about a mixture's experts no fused MoE op has; None: one computes them."""
    kinds = {
        (formats.get(linear, "dense"), f"{linear}.perm" in tensors)
        for linear in _expert_linear_paths(name, moe)
    }
    if len(kinds) > 1:
        return f"experts in several formats ({', '.join(sorted({each for each, _ in kinds}))})"
    weight_format, permuted = kinds.pop()
    static = (
        weight_format in STATIC_INPUT_SCALE_FORMATS
        and activation_scales == PER_TENSOR_ACTIVATION_SCALES
    )
    op = fused_moe_op_of_format(weight_format, has_static_scale=static, has_perm=permuted)
    if op is None and weight_format not in FUSED_MOE_OPS:
        return weight_format
    if op is None:
        return f"{weight_format} with {'static scales' if static else 'columns in another order'}"
    gate = expert_activation(moe.local_expert_modules[0].act)
    if gate is None:
        return "experts with this activation"
    return None if has_gpu_fused_moe_kernel(op, gate) else f"{weight_format} experts without a gate"


def _expert_linear_paths(name: str, moe: MoE) -> Iterator[str]:
    """The paths of both products of each expert of this rank."""
    first = moe.local_experts[0]
    for index, expert in enumerate(moe.local_expert_modules, first):
        paths = {module: path for path, module in expert.named_modules()}
        for linear in expert_linears(expert):
            yield f"{name}.experts.{index}.{paths[linear]}"

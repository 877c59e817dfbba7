"""Dequantize the experts of a layer to x's dtype, for so many tokens that this costs less.

Computes: gate_up[E, 2·I, H] or down[E, H, I] in x's dtype from codes, scales and offsets
Dtypes: packed int4 or e2m1 to bfloat16 or float16
Layout: row-major; codes and scales as in ops/fused_moe.py
Range: any E, I and H
Technique: elementwise kernels of int4_linear.py and mxfp4_linear.py
Used by: grouped_gemm_int4.py

A tile that converts its weight does so again for every tile of tokens, and its loads wait for the
conversion. Written out once, each weight costs the memory four bytes and a half more. int8's tiles
need little to convert: there it did not help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.fused_moe import MAX_DEQUANTIZED_MEMORY_FRACTION, FusedMoEInputs
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.triton.common.device import total_memory


def should_dequantize_experts(inputs: FusedMoEInputs, min_pairs: int) -> bool:
    """Whether each expert has so many pairs, and the GPU memory for a matrix in 16 bits.

    Not in a CUDA graph, which would keep that memory.

    min_pairs: of a token and its expert, for each expert on average.
    """
    experts, rows = inputs.gate_up.shape[:2]
    if inputs.x.element_size() != 2 or inputs.topk_ids.numel() < min_pairs * inputs.num_experts:
        return False
    num_bytes = 2 * experts * rows * inputs.x.shape[1]
    if num_bytes > MAX_DEQUANTIZED_MEMORY_FRACTION * total_memory(inputs.x.device):
        return False
    return not (inputs.x.is_cuda and torch.cuda.is_current_stream_capturing())


def replace_with_dequantized_weight(
    inputs: FusedMoEInputs, name: str, dequantize: Callable[[GroupwiseLinearInputs], torch.Tensor]
) -> FusedMoEInputs:
    """The inputs with one matrix of each expert, "gate_up" or "down", in x's dtype.

    dequantize: of a product's weight with scales [N, groups].
    """
    weight, scale, offset = (getattr(inputs, name + part) for part in ("", "_scale", "_offset"))
    columns = inputs.x.shape[1] if name == "gate_up" else inputs.gate_up.shape[1] // 2
    experts, rows = weight.shape[:2]
    by_row = (experts * rows, -1)
    product = GroupwiseLinearInputs(
        inputs.x.new_empty((0, columns)), weight.view(by_row), scale.view(by_row),
        None if offset is None else offset.view(by_row), inputs.group,
    )  # fmt: skip
    changed: dict[str, Any] = {name: dequantize(product).view(experts, rows, columns)}
    return inputs._replace(**changed | {f"{name}_scale": None, f"{name}_offset": None})

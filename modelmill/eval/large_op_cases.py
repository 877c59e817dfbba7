"""Large GPU cases of ``bench ops``, at which memory bandwidth or tensor cores are the limit.

Sizes are those of prompts of a 7B decoder and of images in ViT-H; smaller cases fit in the caches
or are dominated by launch time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from modelmill.ops import (
    add_layer_norm,
    add_layer_norm_quant,
    branches_add_rms_norm,
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
    gelu,
    gelu_quant,
    gelu_tanh,
    head_projection,
    int4_linear,
    int8_group_linear,
    layer_norm,
    relu2,
    rms_norm_quant,
    rope_cache,
    rptq_linear,
    rptq_quant,
    shared_expert_gate,
    sigmoid_mul,
    silu_mul,
    silu_mul_quant,
    ssd_scan,
    w8a8_linear_swiglu,
)
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.groupwise import cases_for_shapes as groupwise_cases

CaseMaker = Callable[[str, torch.dtype], Iterator[Case]]


def permuted_quant_args(width: int, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield quantization modes with a permutation, in addition to ``named_quant_mode_args``.

    These are int8 with one static scale, and fp8 with a scale per token.
    """
    perm = torch.randperm(width, generator=torch.Generator().manual_seed(width)).int().to(device)
    inv_scale = torch.full((1,), 20.0, device=device)
    yield "int8-static-order", {"dtype": torch.int8, "inv_scale": inv_scale, "perm": perm}
    yield "fp8-token-order", {"dtype": torch.float8_e4m3fn, "perm": perm}


def quantize_cases(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of quantizing rows to 8 bits, in every mode."""
    x = randn(rows, width, device=device, dtype=dtype, seed=1)
    for name, mode in (
        *rms_norm_quant.named_quant_mode_args(width, device, 0),
        *permuted_quant_args(width, device),
    ):
        stored = mode["perm"].numel() if "perm" in mode else width
        yield Case(f"{rows}x{width}-{name}", {"x": x, **mode}, nbytes(x) + rows * stored)


def rope_cases(
    tokens: int, heads: int, dim: int, device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of a prompt: rotate queries and keys, store keys and values in shuffled slots."""
    pages, angles = rope_cache.random_cache_and_angles(tokens, heads, dim, device, dtype, seed=1)
    qkv = randn(tokens, 3 * heads * dim, device=device, dtype=dtype, seed=2)
    args = {"qkv": qkv, "heads": heads, **pages, **angles}
    yield Case(
        f"{tokens}x{heads}/{heads}x{dim}", args, 2 * nbytes(qkv), writes=("k_cache", "v_cache")
    )


def rope_angle_cases(tokens: int, half: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of the rotary angles of a step, with one row of frequencies."""
    # large positions take longer: range reduction of the sine
    positions = torch.arange(tokens, device=device) % 65536
    table = (1e4 ** -(torch.arange(half, device=device) / half))[None]
    args = {
        "positions": positions,
        "keys": torch.zeros_like(positions),
        "table": table,
        "dtype": dtype,
    }
    yield Case(f"{tokens}x{half}-1", args, nbytes(positions) + 8 * tokens * half)


INT4_SHAPES = [(8, 4096, 22016, 128), (64, 11008, 4096, 128), (1024, 4096, 4096, 128)]
INT8_GROUP_SHAPES = [
    (1, 4096, 12288, 32),
    (8, 4096, 12288, 32),
    (64, 4096, 12288, 32),
    (1024, 4096, 12288, 32),
]
RPTQ_SHAPES = [(1024, 4352, 4096, 128, 8)]

QueryLensByStep = tuple[tuple[int, ...], ...]
# decodes of one sequence and of many, short and long prompts alone, prompts beside decodes
QUERY_LENS_BY_STEP: QueryLensByStep = (
    (1,), (1,) * 64, (16,), (64,), (4096,), (1000, 1, 33), (512, *(1,) * 64),
)  # fmt: skip
CPU_QUERY_LENS_BY_STEP: QueryLensByStep = ((1,), (1,) * 16, (128,))
RECURRENCE_CHUNK_TOKENS = 16  # tokens of a page, and so of a chunk


def recurrence_case_makers(lengths: QueryLensByStep) -> dict[str, CaseMaker]:
    """Cases of Qwen3-Next (convolution, delta rule) and Mamba-2 2.7B (convolution, scan)."""
    conv = [(each, channels, 4) for channels in (8192, 5376) for each in lengths]
    delta = [(each, 16, 32, 128, 128) for each in lengths]
    scan = [(each, 1, 80, 64, 128) for each in lengths]
    return {
        "causal_conv": partial(causal_conv.cases_for_shapes, conv),
        "gated_delta_rule": partial(
            gated_delta_rule.cases_for_shapes, delta, chunk=RECURRENCE_CHUNK_TOKENS
        ),
        "ssd_scan": partial(ssd_scan.cases_for_shapes, scan, chunk=RECURRENCE_CHUNK_TOKENS),
    }


STEP_ROWS = (1, 64, 4096)
GATING_OP_CASE_MAKERS: dict[str, CaseMaker] = {
    "gated_rms_norm": partial(
        gated_rms_norm.cases_for_shapes,
        [
            *((rows, 4096, 128, gated_rms_norm.NORM_PER_HEAD) for rows in STEP_ROWS),
            *((rows, 5120, 5120, gated_rms_norm.NORM_AFTER_GATE) for rows in STEP_ROWS),
        ],
    ),
    "shared_expert_gate": partial(
        shared_expert_gate.cases_for_shapes, [(rows, 2048) for rows in STEP_ROWS]
    ),
    "sigmoid_mul": partial(sigmoid_mul.cases_for_shapes, [(rows, 4096) for rows in STEP_ROWS]),
}
"""The gates of Qwen3-Next, and the norm of Mamba-2 2.7B."""

LARGE_CASE_MAKERS: dict[str, CaseMaker] = {
    "quantize": partial(quantize_cases, 16384, 4096),
    "layer_norm": partial(layer_norm.cases_for_shapes, [(16384, 1600)]),
    "add_layer_norm": partial(add_layer_norm.cases_for_shapes, [(16384, 1280)]),
    "add_layer_norm_quant": partial(add_layer_norm_quant.cases_for_shapes, [(16384, 1280)]),
    **recurrence_case_makers(QUERY_LENS_BY_STEP),
    **GATING_OP_CASE_MAKERS,
    "rope_cos_sin": partial(rope_angle_cases, 524288, 64),
    "rope_cache": partial(rope_cases, 4096, 32, 128),
    "silu_mul": partial(silu_mul.cases_for_shapes, [(4096, 11008)]),
    "silu_mul_quant": partial(silu_mul_quant.cases_for_shapes, [(4096, 11008)]),
    "head_projection": partial(
        head_projection.cases_for_shapes, [(rows, 4096, 64) for rows in STEP_ROWS]
    ),
    "branches_add_rms_norm": partial(
        branches_add_rms_norm.cases_for_shapes, [(rows, 4096, True, 1.0) for rows in STEP_ROWS]
    ),
    "relu2": partial(relu2.cases_for_shapes, [(4096, 18432)]),
    "gelu": partial(gelu.cases_for_shapes, [(16384, 5120)]),
    "gelu_tanh": partial(gelu_tanh.cases_for_shapes, [(16384, 4096)]),
    "gelu_quant": partial(gelu_quant.cases_for_shapes, [(16384, 5120)]),
    "int4_linear": partial(groupwise_cases, INT4_SHAPES, int4_linear.random_weight),
    "int8_group_linear": partial(
        groupwise_cases, INT8_GROUP_SHAPES, int8_group_linear.random_weight
    ),
    "rptq_quant": partial(rptq_quant.cases_for_shapes, [(4096, 11008, 128)], full=True),
    "rptq_linear": partial(rptq_linear.cases_for_shapes, RPTQ_SHAPES),
    "w8a8_linear_swiglu": partial(
        w8a8_linear_swiglu.cases_for_shapes, [(1024, 4096, 11008), (4096, 4096, 11008)]
    ),
}

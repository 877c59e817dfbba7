"""Products of clustered integers on tensor cores: int8 · int8 in int32, converted once per group.

Computes: out[M, N] = sum over groups of step · (scale · (q · w) + offset · sum(q)) (+ constant) (+
    bias)
Dtypes: q int8; weights int8 or packed int4; int32 sums of a group, float32 sums
Layout: row-major, contiguous; scales and offsets [N, groups]
Range: any M; groups of a multiple of 32 columns
Technique: int8 tensor cores with the weight as left operand, PDL
Ops: rptq_linear

The weight is the left operand (``_kernel``): 4-bit codes are converted to int8 in registers, and
with few tokens (decode) its rows fill an instruction that the tokens would leave mostly empty. A
packed byte holds two columns 16 apart: the two nibbles are multiplied with the two halves of the
input's columns, so that nothing has to be shuffled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.kernel_support import GemmSupportRange
from modelmill.ops.rptq_linear import RptqLinearInputs
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

# (maximum tokens, tokens per tile, weight rows per tile, maximum block of K, stages, warps)
LAUNCH_CONFIGS_BY_MAX_TOKENS = (
    (16, 16, 32, 256, 4, 4),
    (64, 64, 64, 128, 4, 4),
    (1 << 31, 128, 128, 128, 3, 8),
)


SUPPORTED_PROBLEMS = (GemmSupportRange(group_multiple=32),)


def supports(inputs: RptqLinearInputs) -> bool:
    """All tensors contiguous."""
    q, weight, scale, offset, _, step, constant, bias, _ = inputs
    tensors = (q, weight, scale, offset, step, constant, bias)
    return q.shape[1] > 0 and all(t is None or t.is_contiguous() for t in tensors)


def run(inputs: RptqLinearInputs) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    tokens, columns = q.shape
    n = weight.shape[0]
    out = torch.empty((tokens, n), dtype=dtype, device=q.device)
    block_t, block_n, max_block_k, stages, warps = next(
        row[1:] for row in LAUNCH_CONFIGS_BY_MAX_TOKENS if tokens <= row[0]
    )
    block_k = min(group & -group, max_block_k)  # the largest power of two that divides a group
    _kernel[(-(-n // block_n), -(-tokens // block_t))](
        q, weight, scale, scale if offset is None else offset, step,
        step if constant is None else constant,
        step if bias is None else bias, out, tokens, n, columns, columns // group, weight.stride(0),
        PACKED=weight.dtype is torch.uint8, OFFSET=offset is not None, DYNAMIC=step.dim() == 2,
        CONSTANT=constant is not None, BIAS=bias is not None, GROUP=group, ONE=columns == group,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k, num_stages=stages, num_warps=warps,
        **pdl_launch_options(q.device, tokens),
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    q_ptr, weight_ptr, scale_ptr, offset_ptr, step_ptr, constant_ptr, bias_ptr, out_ptr,
    tokens, n, columns, groups, stride,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, DYNAMIC: tl.constexpr, CONSTANT: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows past the end repeat the last one; their results are not stored.
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(row, n - 1)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_rows = tl.minimum(token, tokens - 1)
    weights = weight_ptr + weight_rows.to(tl.int64)[:, None] * stride
    inputs = q_ptr + token_rows.to(tl.int64)[None, :] * columns
    out = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    dot_sum = tl.zeros([BLOCK_N, BLOCK_T], tl.int32)
    input_sum = tl.zeros([BLOCK_T], tl.int32)
    pdl_wait_and_trigger(PDL)
    for start in range(0, columns, BLOCK_K):
        if not ONE:
            dot_sum = tl.zeros([BLOCK_N, BLOCK_T], tl.int32)
            input_sum = tl.zeros([BLOCK_T], tl.int32)
        if PACKED:
            pair = tl.arange(0, BLOCK_K // 2)
            low = (pair // 16) * 32 + pair % 16
            codes = tl.load(weights + start // 2 + pair[None, :])
            first, second = (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
            q = tl.load(inputs + start + low[:, None])
            other = tl.load(inputs + start + 16 + low[:, None])
            if OFFSET:
                input_sum += tl.sum(q.to(tl.int32), axis=0) + tl.sum(other.to(tl.int32), axis=0)
            if BLOCK_K > 32:
                dot_sum = tl.dot(first, q, dot_sum, out_dtype=tl.int32)
                dot_sum = tl.dot(second, other, dot_sum, out_dtype=tl.int32)
            else:
                # An int8 instruction has K = 32: the halves are concatenated.
                both = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK_N, BLOCK_K))
                column = tl.arange(0, BLOCK_K)
                dot_sum = tl.dot(
                    both, tl.load(inputs + start + column[:, None]), dot_sum, out_dtype=tl.int32
                )
        else:
            column = tl.arange(0, BLOCK_K)
            w = tl.load(weights + start + column[None, :])
            q = tl.load(inputs + start + column[:, None])
            dot_sum = tl.dot(w, q, dot_sum, out_dtype=tl.int32)
        if not ONE:
            out += _scaled_group_sum(
                dot_sum, input_sum, scale_ptr, offset_ptr, step_ptr, weight_rows, token_rows,
                start // GROUP, groups,
                OFFSET, DYNAMIC
            )  # fmt: skip
    if ONE:
        out = _scaled_group_sum(
            dot_sum,
            input_sum,
            scale_ptr,
            offset_ptr,
            step_ptr,
            weight_rows,
            token_rows,
            0,
            groups,
            OFFSET,
            DYNAMIC,
        )
    if CONSTANT:
        out += tl.load(constant_ptr + weight_rows)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + weight_rows).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    live = (token < tokens)[None, :] & (row < n)[:, None]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _scaled_group_sum(
    dot_sum, input_sum, scale_ptr, offset_ptr, step_ptr, weight_rows, token_rows, g, groups,
    OFFSET: tl.constexpr,
    DYNAMIC: tl.constexpr
):  # fmt: skip
    """One group's contribution: step · (scale · A + offset · Q)."""
    scale = tl.load(scale_ptr + weight_rows * groups + g).to(tl.float32)
    part = dot_sum.to(tl.float32) * scale[:, None]
    if OFFSET:
        offset = tl.load(offset_ptr + weight_rows * groups + g).to(tl.float32)
        part += offset[:, None] * input_sum.to(tl.float32)[None, :]
    if DYNAMIC:
        return part * tl.load(step_ptr + token_rows * groups + g)[None, :]
    return part * tl.load(step_ptr + g)

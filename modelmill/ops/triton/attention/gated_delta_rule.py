"""The gated delta rule, token by token, with each head's state in registers (arXiv:2412.06464).

Computes: o[T, H, dv] and the states [H, dk, dv] of decodes and prompts, with a snapshot of each
Dtypes: q, k, v bfloat16, float16 or float32; states and arithmetic float32
Layout: states by slot, read and written in place
Range: dk up to 256, any dv
Technique: a program for a sequence, a head and a block of dv; a loop over the tokens
Ops: gated_delta_rule

The columns of a state are independent of each other: each block of dv reads all of dk. A token's
results do not depend on how many tokens a step has. No integer is read on the host, so that steps
with prompts can be captured as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.gated_delta_rule import L2_EPS, GatedDeltaInputs
from modelmill.ops.triton.common.device import available_on_any_gpu, power_of_two

available = available_on_any_gpu

MAX_KEY_DIM, BLOCK_V = 256, 32


def supports(inputs: GatedDeltaInputs) -> bool:
    """Rows and states that lie together."""
    _, _, dk, dv = inputs.state.shape
    return (
        dk <= MAX_KEY_DIM
        and inputs.qkv.stride(1) == 1
        and inputs.gates.is_contiguous()
        and inputs.state.stride()[1:] == (dk * dv, dv, 1)
        and inputs.state.dtype == torch.float32
    )


def run(inputs: GatedDeltaInputs) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    key_heads = (qkv.shape[1] - heads * dv) // (2 * dk)
    block_k, block_v = power_of_two(dk), min(BLOCK_V, power_of_two(dv))
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make((len(qkv), heads * dv), dtype=torch.float32, device=qkv.device)
    _delta_rule_kernel[(len(rows.slots), heads, -(-dv // block_v))](
        qkv, gates, a_log, dt_bias, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, heads, key_heads, qkv.stride(0), state.stride(0),
        dk**-0.5, L2_EPS, DK=dk, DV=dv, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=max(1, min(8, block_k * block_v // 1024)),
    )  # fmt: skip
    return out


@triton.jit
def _delta_rule_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, start_ptr, position_ptr,
    slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, heads, key_heads, row_stride, slot_stride,
    scale, eps, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_ptr + sequence)
    stop = tl.load(start_ptr + sequence + 1)
    if stop > start:
        k = tl.arange(0, BLOCK_K)
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside_k, inside_v = k < DK, v < DV
        inside = inside_k[:, None] & inside_v[None, :]
        place = head * DK * DV + k[:, None] * DV + v[None, :]
        slot = tl.load(slot_ptr + sequence) * slot_stride
        snapshot = tl.load(snapshot_slot_ptr + sequence) * slot_stride
        end = tl.load(snapshot_end_ptr + sequence)
        first = tl.load(position_ptr + start)
        s = tl.load(state_ptr + slot + place, mask=inside, other=0.0)
        s = tl.where(first > 0, s, 0.0)
        if end == first:
            tl.store(state_ptr + snapshot + place, s, mask=inside)
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        key_head = head // (heads // key_heads)
        t, position = start.to(tl.int64), first
        for _ in range(start, stop):
            row = qkv_ptr + t * row_stride
            q_row = row + key_head * DK
            q = tl.load(q_row + k, mask=inside_k, other=0.0).to(tl.float32)
            key = tl.load(q_row + key_heads * DK + k, mask=inside_k, other=0.0).to(tl.float32)
            v_row = row + 2 * key_heads * DK + head * DV
            value = tl.load(v_row + v, mask=inside_v, other=0.0).to(tl.float32)
            q = q * tl.rsqrt(tl.sum(q * q) + eps) * scale
            key = key * tl.rsqrt(tl.sum(key * key) + eps)
            gate = gates_ptr + t * 2 * heads + head
            beta = 1.0 / (1.0 + tl.exp(-tl.load(gate)))
            x = tl.load(gate + heads) + bias
            step = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
            s = s * tl.exp(-rate * step)
            answer = tl.sum(s * key[:, None], 0)
            s = s + key[:, None] * ((value - answer) * beta)[None, :]
            out = out_ptr + t * heads * DV + head * DV + v
            tl.store(out, tl.sum(s * q[:, None], 0), mask=inside_v)
            t, position = t + 1, position + 1
            if position == end:
                tl.store(state_ptr + snapshot + place, s, mask=inside)
        tl.store(state_ptr + slot + place, s, mask=inside)

"""Programmatic dependent launch (PDL): a kernel starts before the previous one ends (Hopper+).

Computes: nothing: launches the next kernel and waits for the previous ones
Dtypes: any
Layout: any
Range: compute capability ≥ 9.0; no effect on others
Technique: PDL (griddepcontrol)
Used by: add_rms_norm.py, argmax.py, branches_add_rms_norm.py, custom_all_reduce.py, fused_topk.py,
    gated_rms_norm.py, gelu.py, gelu_quant.py, gelu_tanh.py, gemm_8bit.py, grouped_gemm.py,
    grouped_gemm_int4.py, int4_linear.py, int8_group_linear.py, latent_rope_cache.py, layer_norm.py,
    layer_norm_quant.py, linear.py, moe_align_block_size.py, moe_decode.py, moe_decode_int4.py,
    mxfp4_linear.py, norm_quant.py, paged_attention.py, paged_decode.py, paged_latent.py,
    relative_attention.py, relu2.py, rms_norm.py, rope_cache.py, rope_cos_sin.py, router_gemm.py,
    rptq_linear.py, rptq_quant.py, sample.py, shared_expert_gate.py, sigmoid_mul.py, silu_mul.py,
    silu_mul_quant.py

A kernel launched with ``**pdl_launch_options(device, rows)`` may start before the previous kernel
has ended. Until ``pdl_wait_and_trigger`` returns it may only read what no kernel of the step
writes: weights, page tables, lengths; behind a kernel launched with ``after_wait`` also what the
kernels before that one wrote. A matrix product can thus load its first weights while a norm or
attention kernel computes. Every program must call ``pdl_wait_and_trigger`` before it returns, so
that the end of a kernel
implies the end of all kernels before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelmill.ops.triton.common.device import supports_pdl

TRIGGER_AT_START = 1  # the next kernel may start once all programs of this one have started
TRIGGER_AFTER_WAIT = 2  # the same, but only after the previous kernels have ended


def pdl_launch_options(
    device: torch.device, rows: int, *, after_wait: bool = False
) -> dict[str, Any]:
    """Launch options, with the kernel's PDL constexpr, for ``rows`` tokens.

    after_wait: whether the next kernel may rely on it that the kernels before this one have ended.

    A kernel for one row has thousands of small programs, which can use any free SM resources. With
    more rows there are fewer and larger programs: started while two earlier kernels are still
    running, they would crowd the SMs that the first of those frees.
    """
    if not supports_pdl(device):
        return {"PDL": 0, "launch_pdl": False}
    at_start = rows == 1 and not after_wait
    return {"PDL": TRIGGER_AT_START if at_start else TRIGGER_AFTER_WAIT, "launch_pdl": True}


@triton.jit
def pdl_wait_and_trigger(PDL: tl.constexpr):
    """Trigger the launch of the next kernel as PDL requires, and wait for the previous kernels."""
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()

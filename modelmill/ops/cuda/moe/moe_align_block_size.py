"""Pairs of a token and an expert sorted by expert, in one launch (moe_align.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.moe_align_block_size import max_expert_blocks

MAX_PAIRS = 8192
MAX_EXPERTS = 128
"""The kernel serves 1024, but its one block counts every expert for each warp: with 300 and 512
experts Triton's blocks take half the time (H200, 7.1 and 10.0 µs instead of 12.5 and 20.2)."""
_THREADS, _WARPS = 1024, 32


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason."""
    return build.kernel_compile_failure_reason(device_type, "moe_align", ())


def supports(topk_ids: torch.Tensor, block_size: int, experts: int) -> bool:
    """Packed int32 ids, few enough for one block."""
    packed = topk_ids.is_cuda and topk_ids.dtype == torch.int32 and topk_ids.is_contiguous()
    return packed and 0 < topk_ids.numel() <= MAX_PAIRS and experts <= MAX_EXPERTS


def run(topk_ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op."""
    pairs, device = topk_ids.numel(), topk_ids.device
    blocks = max_expert_blocks(pairs, block_size, experts)
    sorted_ids = torch.empty(blocks * block_size, dtype=torch.int32, device=device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        shared = (_WARPS + 1) * 4 * experts
        kernel = launch.compile_and_load_kernel(
            "moe_align", "moe_align", (), _THREADS, shared, topk_ids.get_device()
        )
        pointers = launch.data_pointers(topk_ids, sorted_ids, expert_ids)
        work = struct.pack("=3Q4i", *pointers, pairs, experts, block_size, blocks)
        kernel.launch(1, work, pdl=True)
    return sorted_ids, expert_ids

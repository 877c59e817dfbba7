"""A whole mixture of experts in one C++ call (routed_moe.cpp), to the bit as the single ops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import load_gemm_function
from modelmill.ops.cpu.moe import int4_fused_moe, int8_fused_moe, mxfp4_fused_moe
from modelmill.ops.cpu.moe.experts import (
    UNUSED_SWIGLU_CLAMP,
    pack_experts_call,
    scale_dtype_code,
    tensor_address,
)
from modelmill.ops.cpu.moe.fused_topk import double_to_bits, pack_topk_rules, supports_topk_rules
from modelmill.ops.routed_moe import RoutedMoEWeights

unavailable_reason = build.unavailable_reason
_FUSED_MOE_OPS = {
    "int8_fused_moe": int8_fused_moe,
    "int4_fused_moe": int4_fused_moe,
    "mxfp4_fused_moe": mxfp4_fused_moe,
}
_FUSED_MOE_OP_NAMES_BY_CODE = list(_FUSED_MOE_OPS)
"""In the order of kOps in routed_moe.cpp."""


class _MoEAddressTable(NamedTuple):
    """The addresses of a mixture's tensors as routed_moe.cpp reads them.

    Attributes:
        words: its RoutedMoE.
        at: where they lie; 0 where the kernel does not serve the mixture.
    """

    words: np.ndarray
    at: int


def supports(
    x: torch.Tensor,
    moe: RoutedMoEWeights,
    router_input: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> bool:
    """A few packed rows of the router's dtype, where the kernels of the replaced ops serve them."""
    packed = moe.packed.get("cpu")
    if packed is None:
        packed = moe.packed["cpu"] = _pack_moe_addresses(moe)
    return (
        packed.at != 0
        and x.shape[0] <= build.SMALL_M_LIMIT
        and _is_contiguous_router_dtype(moe, x)
        and (router_input is None or _is_contiguous_router_dtype(moe, router_input))
        and (shared is None or _is_contiguous_router_dtype(moe, shared))
    )


def _is_contiguous_router_dtype(moe: RoutedMoEWeights, x: torch.Tensor) -> bool:
    return x.dtype is moe.router.dtype and x.is_contiguous()


def run(
    x: torch.Tensor,
    moe: RoutedMoEWeights,
    router_input: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the op; ``supports`` has packed the weights."""
    out = torch.empty_like(x)
    load_gemm_function("routed_moe", "pppppqi")(
        out.data_ptr(), x.data_ptr(), (x if router_input is None else router_input).data_ptr(),
        None if shared is None else shared.data_ptr(), moe.packed["cpu"].at, x.shape[0],
        build.DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def _pack_moe_addresses(moe: RoutedMoEWeights) -> _MoEAddressTable:
    """Of what the kernel does not serve, no words."""
    router, experts = moe.router, moe.experts
    vectors = [each for each in (moe.router_bias, moe.expert_scale) if each is not None]
    if (
        moe.op not in _FUSED_MOE_OPS
        or not _FUSED_MOE_OPS[moe.op].supports(experts)
        or not supports_topk_rules(moe.rules, len(router))
        or moe.rules.local_experts is not None
        or router.dtype is not experts.x.dtype
        or not router.is_contiguous()
        or any(each.dtype not in build.DTYPE_CODES or not each.is_contiguous() for each in vectors)
    ):
        return _MoEAddressTable(np.zeros(0, np.int64), 0)
    words = np.array(
        (
            router.data_ptr(), tensor_address(moe.router_bias), tensor_address(moe.expert_scale),
            _dtype_code(moe.router_bias), _dtype_code(moe.expert_scale),
            *map(double_to_bits, (moe.logit_scale, *(experts.clamp or UNUSED_SWIGLU_CLAMP))),
            _FUSED_MOE_OP_NAMES_BY_CODE.index(moe.op), scale_dtype_code(experts),
            *pack_topk_rules(moe.rules, len(router)), *_pack_experts_call(moe),
        ),
        dtype=np.int64,
    )  # fmt: skip
    return _MoEAddressTable(words, words.ctypes.data)


def _pack_experts_call(moe: RoutedMoEWeights) -> list[int]:
    """The call of the experts with as many of them a token as the router chooses."""
    ids = moe.experts.topk_ids.new_empty(0, moe.rules.top_k)
    return pack_experts_call(moe.experts._replace(topk_ids=ids), moe.experts.x)


def _dtype_code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else build.DTYPE_CODES[tensor.dtype]

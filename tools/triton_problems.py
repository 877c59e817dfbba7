"""Calls that reach every variant of the Triton kernels that the package can choose on a GPU.

The largest sizes that ``supports`` lets through and the corners of the choosing code: the tensors
are on torch's meta device, since only sizes and dtypes decide. Launch configs that an autotune file
may name come from the implementations' own ``candidates``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch

from modelmill.ops import registry
from modelmill.ops.add_layer_norm_quant import AddLayerNormQuantInputs
from modelmill.ops.branches_add_rms_norm import BranchesAddRMSNormInputs
from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.ops.fused_moe import GELU_TANH, RELU2, FusedMoEInputs, SwigluOaiParams
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, SPARSE_MIXER, FusedTopkInputs
from modelmill.ops.gated_delta_rule import GatedDeltaInputs
from modelmill.ops.gated_rms_norm import GatedRMSNormInputs
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.image_attention import ImageAttentionInputs
from modelmill.ops.latent_rope_cache import LatentRopeCacheInputs
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.rope_cos_sin import RopeCosSinInputs
from modelmill.ops.rptq_linear import RptqLinearInputs
from modelmill.ops.rptq_quant import RptqQuantInputs
from modelmill.ops.sample import SampleInputs
from modelmill.ops.score_mods import ScoreMods
from modelmill.ops.ssd_scan import SSDScanInputs
from modelmill.ops.triton.communication import custom_all_reduce
from modelmill.ops.triton.norm_quantize import gptq_columns
from modelmill.ops.w8a8_linear import Linear8BitInputs
from modelmill.parallel.peer_buffers import ROW_WORDS

Problem = tuple[str, Callable[[], Any]]
BF16, F32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
# rows of a weight: few and many (choices change at 512, 8,192, 16,384 and at 64 per SM)
FEW, N, MANY = 256, 4096, 32768
K, UNEVEN_K = 4096, 4160
# a row count of each bucket
ROWS = (1, 8, 16, 32, 64, 128, 512)
# ops without a list of their own, whose cases hold every variant
BY_CASES = ("upsample_masks",)


def problems() -> Iterator[Problem]:
    """(op, call) of every problem that the current GPU's kernels serve."""
    for make in (
        gemm_16bit, gemm_weight_only, gemm_8bit, gemm_clustered, prefill_attention,
        decode_attention, latent_attention, image_attention, norm_quantize, norms, elementwise,
        rope, sampling, communication, experts, routing, recurrences, cases,
    ):  # fmt: skip
        yield from make()


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def recurrences() -> Iterator[Problem]:
    """Decodes and prompts of Qwen3-Next's and Mamba2's heads, and of smaller and larger sizes."""
    for tokens, key_heads, heads, dim, chunk, dtype in (
        (1, 16, 32, 128, 16, BF16), (64, 16, 32, 128, 16, BF16), (64, 16, 32, 128, 16, F32),
        (64, 2, 4, 64, 8, BF16), (64, 4, 8, 256, 64, BF16), (64, 4, 8, 256, 64, F32),
    ):  # fmt: skip
        rows = _state_rows(tokens, chunk)
        inputs = GatedDeltaInputs(
            tensor(tokens, (2 * key_heads + heads) * dim, dtype=dtype),
            tensor(tokens, 2 * heads, dtype=torch.float32), tensor(heads), tensor(heads),
            tensor(3, heads, dim, dim, dtype=torch.float32), rows,
        )  # fmt: skip
        yield from _call("gated_delta_rule", inputs)
    for tokens, groups, heads, dim, size, chunk, dtype in (
        (1, 1, 80, 64, 128, 16, BF16), (64, 1, 80, 64, 128, 16, BF16),
        (64, 1, 80, 64, 128, 16, F32), (64, 2, 8, 64, 256, 64, BF16), (64, 2, 8, 64, 256, 64, F32),
        (64, 2, 8, 8, 8, 8, BF16),
    ):  # fmt: skip
        by_head = tensor(heads)
        yield from _call("ssd_scan", SSDScanInputs(
            tensor(tokens, heads * dim + 2 * groups * size, dtype=dtype),
            tensor(tokens, heads, dtype=F32),
            by_head, by_head, by_head, (0.0, float("inf")),
            tensor(3, heads, dim, size, dtype=F32), _state_rows(tokens, chunk),
        ))  # fmt: skip
    for tokens, width, group, weights, gate_first in (
        (1, 4096, 128, 128, False), (64, 4096, 128, 128, False), (1, 5120, 5120, 5120, True),
        (64, 4096, 512, 4096, True), (64, 4096, 512, 4096, False), (64, 16384, 16384, 0, True),
    ):  # fmt: skip
        x, weight = tensor(tokens, width, dtype=F32), tensor(weights) if weights else None
        gate = tensor(tokens, 3 * width)[:, 2 * width :]
        gated = GatedRMSNormInputs(x, gate, weight, 1e-6, group, gate_first)
        yield from _call("gated_rms_norm", gated)
    for tokens, channels, width, bias, silu in (
        (1, 8192, 4, None, True), (64, 5376, 4, tensor(5376), True),
        (1, 2048, 3, None, False), (64, 2048, 3, None, False),
    ):  # fmt: skip
        yield from _call("causal_conv", CausalConvInputs(
            tensor(tokens, channels + 64), tensor(3, width - 1, channels), tensor(channels, width),
            bias, _state_rows(tokens, 16), silu,
        ))  # fmt: skip


def _state_rows(tokens: int, chunk: int) -> RecurrentStepMetadata:
    """One sequence of so many tokens."""
    slots = tensor(1, dtype=torch.int64)
    return RecurrentStepMetadata(
        tensor(2, dtype=torch.int32), tensor(tokens, dtype=torch.int64), slots, slots, slots,
        tokens, chunk,
    )  # fmt: skip


def _call(op: str, *args: Any) -> Iterator[Problem]:
    """One call, if the implementation serves it on this GPU."""
    module = registry.implementation(op, "triton")
    assert module is not None, f"Triton implements {op}"
    if registry.backend_serves_args(op, "triton", *args):
        yield op, partial(module.run, *args)


def _tuned(op: str, *args: Any) -> Iterator[Problem]:
    """The call with its default launch config, and with each that autotuning may choose."""
    module = registry.implementation(op, "triton")
    assert module is not None, f"Triton implements {op}"
    if registry.backend_serves_args(op, "triton", *args):
        yield op, partial(module.run, *args)
        x, weight = registry.op_declarations()[op].flatten_operands(*args)[:2]
        key = module.gemm_key(x, weight)
        for config in module.candidates(key):
            yield op, partial(module.run, *args, configs={key: config})


def gemm_16bit() -> Iterator[Problem]:
    """Weights of x's dtype; float32 has one row."""
    for rows in (1, 8, 16):
        yield from _tuned("linear", tensor(rows, K), tensor(N, K))
        yield from _call("linear", tensor(rows, K), tensor(MANY, K))
        yield from _call("linear_swiglu", tensor(rows, K), tensor(N, K))
    for rows in (1, 16):
        yield from _call("linear", tensor(rows, UNEVEN_K), tensor(FEW, UNEVEN_K), tensor(FEW))
    yield from _call("linear", tensor(1, K, dtype=F32), tensor(N, K, dtype=F32))


def gemm_weight_only() -> Iterator[Problem]:
    """Weights of int8, of int8 and int4 in groups, and of fp8 with activations of 16 bits."""
    scale = tensor(N, dtype=F32)
    for rows in ROWS:
        weight = tensor(N, K, dtype=INT8)
        yield from (_call if rows == 1 else _tuned)("int8_linear", tensor(rows, K), weight, scale)
    for rows in (8, 64, 512):
        fp8 = Linear8BitInputs(tensor(rows, K), tensor(N, K, dtype=FP8), scale, None, BF16)
        yield from _call("fp8_linear", fp8)
    yield from _call("int8_linear", tensor(16, K, dtype=F32), weight, scale)
    yield from _call("int8_linear_swiglu", tensor(16, K), weight, scale)
    yield from _groupwise("int8_group_linear", torch.int8, 1)
    yield from _groupwise("int4_linear", torch.uint8, 2)
    for rows, dtype in ((16, BF16), (32, BF16), (64, BF16), (512, BF16), (16, F32)):
        blocks = tensor(N, K // 32, dtype=torch.uint8)
        weight, x = tensor(N, K // 2, dtype=torch.uint8), tensor(rows, K, dtype=dtype)
        yield from _call("mxfp4_linear", GroupwiseLinearInputs(x, weight, blocks, None, 32))


def _groupwise(op: str, stored: torch.dtype, per_byte: int) -> Iterator[Problem]:
    sizes = [(rows, 128, BF16, N) for rows in (16, 32, 64, 512)]
    sizes += [(16, 128, BF16, MANY), (16, 32, BF16, N), (16, 128, F32, N)]
    for rows, group, dtype, n in sizes:
        grid = tensor(n, K // group, dtype=dtype)
        weight, x = tensor(n, K // per_byte, dtype=stored), tensor(rows, K, dtype=dtype)
        offset = None if group == 32 else grid
        yield from _call(op, GroupwiseLinearInputs(x, weight, grid, offset, group))


def gemm_8bit() -> Iterator[Problem]:
    """Weights and activations of int8 or fp8."""
    for (op, dtype), rows in itertools.product((("w8a8_linear", INT8), ("fp8_linear", FP8)), ROWS):
        for n in (N, MANY, FEW) if rows < 32 and dtype == INT8 else (N,):
            tune = _tuned if n == N and rows > 1 and dtype == INT8 else _call
            scale, x_scale = tensor(n, dtype=F32), tensor(rows, dtype=F32)
            x, weight = tensor(rows, K, dtype=dtype), tensor(n, K, dtype=dtype)
            yield from tune(op, Linear8BitInputs(x, weight, scale, x_scale, BF16))


def gemm_clustered() -> Iterator[Problem]:
    """Integers in clusters, with packed and plain weights; groups of a whole row and of 32."""
    for rows, packed in itertools.product((16, 64, 512), (False, True)):
        group = 32 if (rows, packed) == (16, True) else K
        grid = tensor(N, K // group, dtype=F32)
        step = tensor(rows, K // group, dtype=F32)
        weight = tensor(N, K // 2, dtype=torch.uint8) if packed else tensor(N, K, dtype=INT8)
        inputs = RptqLinearInputs(
            tensor(rows, K, dtype=INT8), weight, grid, grid if packed else None, group, step,
            None, None, BF16,
        )  # fmt: skip
        yield from _call("rptq_linear", inputs)


def attention(
    dtype: torch.dtype, stored: torch.dtype, dim: int, heads: tuple[int, int], batch: int,
    query: int, context: int, window: int | None = None, page_size: int = 16,
) -> PagedAttentionInputs:  # fmt: skip
    """Inputs of ``paged_attention``.

    dtype: of q; stored: of the pages; heads: query heads and KV heads; batch: sequences of
    ``query`` new tokens and ``context`` keys.
    """
    layout = batch * context // page_size, heads[1], page_size
    pages = tensor(*layout, dim, dtype=stored)
    scale = None if stored == dtype else tensor(*layout, dtype=F32)
    lengths = tensor(batch, dtype=torch.int32)
    return PagedAttentionInputs(
        tensor(batch * query, heads[0], dim, dtype=dtype), pages, pages,
        tensor(batch, context // page_size, dtype=torch.int32),
        tensor(batch + 1, dtype=torch.int32), lengths, query, context, dim**-0.5, window,
        scale, scale,
    )  # fmt: skip


def prefill_attention() -> Iterator[Problem]:
    """Prompts of up to 16, up to 64 and more tokens; heads of 128 and 256 channels."""
    sizes = [(16, 256, BF16, 4096), (4096, 128, BF16, 4096), (4096, 256, BF16, 4096)]
    sizes += [(64, 128, INT8, 4096), (4096, 128, INT8, 4096), (4096, 256, FP8, 4096)]
    sizes += [(512, 128, BF16, 512)]  # too few tiles for an even load
    for query, dim, stored, context in sizes:
        inputs = attention(BF16, stored, dim, (8, 2), 1, query, context)
        yield from _call("paged_attention", inputs)
    for dim, stored in ((128, F32), (256, INT8)):
        yield from _call("paged_attention", attention(F32, stored, dim, (8, 8), 1, 64, 64))
    for query, dim, mods in itertools.product((16, 64, 4096), (64, 256), score_mods(8)):
        inputs = attention(BF16, BF16, dim, (8, 2), 1, query, 4096)
        yield from _call("paged_attention", inputs._replace(score_mods=mods))


def score_mods(heads: int) -> tuple[ScoreMods, ...]:
    """A soft cap, slopes of ALiBi, and sinks."""
    each = tensor(heads, dtype=F32)
    return ScoreMods(softcap=50.0), ScoreMods(alibi_slopes=each), ScoreMods(sinks=each)


def decode_attention() -> Iterator[Problem]:
    """One query a sequence: one head or a group of heads a program, with and without splits."""
    for dim, stored, batch in (
        (128, BF16, 256),
        (256, BF16, 1),
        (128, INT8, 1),
        (128, INT8, 256),
        (256, INT8, 1),
        (128, FP8, 1),
    ):
        inputs = attention(BF16, stored, dim, (32, 8), batch, 1, 4096)
        yield from _call("paged_attention", inputs)
    for (dim, batch), mods in itertools.product(((64, 1), (256, 256)), score_mods(32)):
        inputs = attention(BF16, BF16, dim, (32, 8), batch, 1, 4096)
        yield from _call("paged_attention", inputs._replace(score_mods=mods))
    for heads in (128, 256):  # of one KV head
        yield from _call("paged_attention", attention(BF16, BF16, 256, (heads, 1), 1, 1, 4096))
    for dtype, stored in ((BF16, INT8), (F32, F32)):
        inputs = attention(dtype, stored, 256, (32, 32), 1, 1, 4096)
        yield from _call("paged_attention", inputs)


def latent_attention() -> Iterator[Problem]:
    """Decode and prompts of DeepSeek-V2-Lite's and V3's heads, absorbed and expanded."""
    for (heads, query), stored in itertools.product(
        ((16, 1), (32, 1), (128, 1), (16, 512)), (BF16, INT8, FP8)
    ):
        inputs = attention(BF16, stored, 576, (heads, 1), 1, query, 4096)
        yield from _call("paged_attention", inputs._replace(value_dim=512))
    for dtype, stored, dim, value_dim in ((F32, F32, 576, 512), (F32, INT8, 576, 512),
                                          (BF16, BF16, 32, 24)):  # fmt: skip
        inputs = attention(dtype, stored, dim, (16, 1), 1, 1, 4096)
        yield from _call("paged_attention", inputs._replace(value_dim=value_dim))
    for query in (16, 512, 4096):  # expanded: pages of one token
        inputs = attention(BF16, BF16, 192, (16, 16), 1, query, query, page_size=1)
        yield from _call("paged_attention", inputs)


def image_attention() -> Iterator[Problem]:
    """Windows and whole images, with relative positions, a table of biases or none."""
    images: list[tuple[torch.dtype, int, int, int | None]] = [
        (BF16, 80, 64, None),
        (BF16, 128, 128, None),
        (F32, 128, 128, None),
    ]
    images += [(BF16, 80, 64, 14), (F32, 128, 64, 14), (BF16, 128, 96, None)]
    images += [(BF16, 64, 14, 7)]
    for dtype, dim, side, window in images:
        span = side if window is None else window
        rel = tensor(2 * span - 1, dim, dtype=dtype)
        fill = tensor(3, 16, dim, dtype=dtype) if side % span else None
        qkv = tensor(1, side, side, 3, 16, dim, dtype=dtype)
        relative = ImageAttentionInputs(qkv, 16, window, fill, rel, rel)
        yield from _call("image_attention", relative)
    for dtype in (BF16, F32):
        qkv = tensor(1, 14, 14, 3, 16, 128, dtype=dtype)
        yield from _call("image_attention", ImageAttentionInputs(qkv, 16, 14, None))
        bias = tensor(16, 49, dtype=F32)
        yield from _call("image_attention", ImageAttentionInputs(qkv, 16, 7, None, bias=bias))


def norm_quantize() -> Iterator[Problem]:
    """Norm and quantization in one kernel; the widest rows, also permuted and scaled by column."""
    for dtype, width in ((BF16, 4096), (BF16, 16384), (F32, 8192), (F32, 16384)):
        x, weight = tensor(8192, width, dtype=dtype), tensor(width, dtype=dtype)
        factor, order = tensor(width, dtype=F32), tensor(width, dtype=torch.int32)
        per_column = ActQuantSpec(INT8, factor, order, order)
        yield from _call("add_rms_norm_quant", x, x, weight, 1e-6, per_column)
    for spec in (ActQuantSpec(INT8), ActQuantSpec(FP8), ActQuantSpec(INT8, None, None, order)):
        yield from _call("rms_norm_quant", tensor(1, width), tensor(width), 1e-6, spec)
    wide = tensor(2 * width, dtype=torch.int32)
    for spec in (ActQuantSpec(INT8), ActQuantSpec(INT8, None, None, wide)):
        yield from _call("quantize", tensor(8192, 2 * width), spec)


def norms() -> Iterator[Problem]:
    """Norms of the widest rows that they support, of one row and of many narrow ones."""
    for dtype, rows, width in ((BF16, 8192, 1280), (BF16, 1, 16384), (F32, 1, 16384)):
        x, weight = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
        yield from _call("add_layer_norm", x, x, weight, weight, 1e-6)
        inputs = AddLayerNormQuantInputs(x, x, weight, weight, 1e-6, INT8)
        yield from _call("add_layer_norm_quant", inputs)
    inputs = AddLayerNormQuantInputs(x, x, weight, weight, 1e-6, FP8)
    yield from _call("add_layer_norm_quant", inputs)
    for dtype, rows, width in ((BF16, 1, 32768), (F32, 8192, 32768), (BF16, 8192, 128)):
        x, weight = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
        yield from _call("rms_norm", x, weight, 1e-6)
        yield from _call("add_rms_norm", x, x, weight, 1e-6)
        yield from _call("layer_norm", x, weight, weight, 1e-6)
    for dtype, rows, width in ((BF16, 1, 5120), (F32, 4096, 32768)):
        x, weight = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
        for other, factor in ((None, 0.22), (x, 1.0)):
            branches = BranchesAddRMSNormInputs(x, other, factor, x, weight, 1e-6)
            yield from _call("branches_add_rms_norm", branches)


def elementwise() -> Iterator[Problem]:
    """Activation functions, with and without an 8-bit output, and GPTQ's columns."""
    for dtype, rows in ((BF16, 1), (F32, 4096)):
        x = tensor(rows, 16384, dtype=dtype)
        for op in ("gelu", "gelu_tanh", "relu2", "silu_mul"):
            yield from _call(op, x)
        yield from _call("sigmoid_mul", x, x)
        for out in (INT8, FP8):
            yield from _call("gelu_quant", x, out)
            yield from _call("silu_mul_quant", tensor(rows, 65536, dtype=dtype), out)
    order, step = tensor(16384, dtype=torch.int32), tensor(16384, dtype=F32)
    for inputs in (
        RptqQuantInputs(tensor(16, 32768), order, step, order, 8, 128, gated=True),
        RptqQuantInputs(tensor(16, 16384, dtype=F32), order, None, None, 4, 8192),
    ):
        yield from _call("rptq_quant", inputs)
    work, block = tensor(N, K, dtype=F32), tensor(N, 128, dtype=F32)
    args = (work, work, 0, work, work, 16, work, block, False)
    yield "gptq", partial(gptq_columns.run, *args)


def rope() -> Iterator[Problem]:
    """Rotation and the write to the cache, in each dtype of the pages."""
    for dtype, stored, dim in (
        (BF16, BF16, 128),
        (BF16, INT8, 256),
        (BF16, FP8, 128),
        (F32, F32, 256),
    ):
        pages = tensor(64, 8, 16, dim, dtype=stored)
        scale = None if stored == dtype else tensor(64, 8, 16, dtype=F32)
        angle, norm = tensor(16, dim // 2, dtype=F32), tensor(dim, dtype=dtype)
        inputs = RopeCacheInputs(
            pages, pages, tensor(16, dtype=torch.int32), 32, angle, angle,
            tensor(16, dtype=F32), norm, norm, 1e-6, scale, scale,
        )  # fmt: skip
        yield from _call("rope_cache", tensor(16, 48 * dim, dtype=dtype), inputs)
    yield from latent_rope()
    for dtype, rows in ((BF16, 1), (F32, 32)):
        index, table = tensor(300, dtype=torch.int64), tensor(rows, 64, dtype=F32)
        logn = None if rows == 1 else 4096
        yield from _call("rope_cos_sin", RopeCosSinInputs(index, index, table, 1.0, logn, dtype))


def latent_rope() -> Iterator[Problem]:
    """The same of latent attention: DeepSeek's sizes, both orders of pairs, and the largest."""
    for tokens, dtype, stored, heads, sizes in (
        (1, BF16, BF16, 16, (512, 64, 192)), (4096, BF16, BF16, 128, (512, 64, 192)),
        (1, BF16, INT8, 128, (512, 64, 192)), (64, BF16, FP8, 16, (512, 64, 192)),
        (1, F32, F32, 16, (2048, 256, 512)), (1, F32, INT8, 2, (24, 6, 20)),
    ):  # fmt: skip
        rank, rope_dim, query_dim = sizes
        angle = tensor(tokens, rope_dim // 2, dtype=F32)
        for interleaved in (True, False):
            inputs = LatentRopeCacheInputs(
                tensor(rank, dtype=dtype), tensor(64, 1, 16, rank + rope_dim, dtype=stored),
                tensor(tokens, dtype=torch.int64), angle, angle, interleaved, 1e-6,
                None if stored == dtype else tensor(64, 1, 16, dtype=F32),
            )  # fmt: skip
            q = tensor(tokens, heads, query_dim, dtype=dtype)
            latent = tensor(tokens, rank + rope_dim, dtype=dtype)
            yield from _call("latent_rope_cache", q, latent, inputs)


def sampling() -> Iterator[Problem]:
    """The largest vocabulary and an ordinary one, for many rows and for one."""
    for rows, vocab in ((1, 151936), (64, (1 << 22) - 1)):
        logits, row = tensor(rows, vocab, dtype=F32), tensor(rows, dtype=F32)
        top_k, noise = tensor(rows, dtype=torch.int32), tensor(rows, dtype=torch.float64)
        yield from _call("argmax", logits)
        yield from _call("sample", SampleInputs(logits, row, top_k, row, row, noise))


def communication() -> Iterator[Problem]:
    """Sums and columns of 8 ranks."""
    counters, abort = tensor(128, dtype=torch.int32), tensor(1, dtype=torch.int32)
    addresses = tuple(1 << 40 | rank << 32 for rank in range(8))
    buffers = custom_all_reduce.AllReduceBuffers(0, addresses, counters, abort, ROW_WORDS)
    for dtype in (BF16, F32):
        x, weight = tensor(16, 8192, dtype=dtype), tensor(8192, dtype=dtype)
        reduce, gather = custom_all_reduce.all_reduce_rows, custom_all_reduce.all_gather_columns
        for norm in (None, (x, weight, 1e-6)):
            yield "all_reduce", partial(reduce, x, norm, buffers)
        starts = tensor(9, dtype=torch.int32)
        yield "all_gather", partial(gather, x, starts, (8192,) * 8, buffers)


def experts() -> Iterator[Problem]:
    """Experts of a few tokens, and tiles of each size."""
    for tokens, dtype, shared in (
        (1, BF16, False), (4, BF16, True), (1, F32, False), (16, F32, False),
        (32, BF16, False), (512, BF16, False), (1024, BF16, True), (4096, BF16, False),
    ):  # fmt: skip
        x, routing_weights = tensor(tokens, 2048, dtype=dtype), tensor(tokens, 8, dtype=F32)
        inputs = FusedMoEInputs(
            x, routing_weights, tensor(tokens, 8, dtype=torch.int32),
            tensor(128, 1536, 2048, dtype=dtype), tensor(128, 2048, 768, dtype=dtype),
            x if shared else None,
        )  # fmt: skip
        yield from _call("fused_moe", inputs)
        int8: dict[str, Any] = {
            "gate_up": tensor(128, 1536, 2048, dtype=INT8),
            "down": tensor(128, 2048, 768, dtype=INT8),
            "gate_up_scale": tensor(128, 1536, dtype=F32),
            "down_scale": tensor(128, 2048, dtype=F32),
        }
        yield from _call("int8_fused_moe", inputs._replace(**int8))
        yield from _call("w8a8_fused_moe", inputs._replace(**int8))
        fp8 = {name: tensor(*int8[name].shape, dtype=FP8) for name in ("gate_up", "down")}
        yield from _call("fp8_fused_moe", inputs._replace(**int8 | fp8))
        group, half = (32, torch.float16) if shared else (128, BF16)
        grids = {
            "gate_up_scale": tensor(128, 1536, 2048 // group, dtype=half),
            "down_scale": tensor(128, 2048, 768 // group, dtype=half),
        }
        offsets = {name.replace("scale", "offset"): grid for name, grid in grids.items()}
        int4: dict[str, Any] = {
            "gate_up": tensor(128, 1536, 1024, dtype=torch.uint8),
            "down": tensor(128, 2048, 384, dtype=torch.uint8),
            **grids, **({} if shared else offsets), "group": group,
        }  # fmt: skip
        yield from _call("int4_fused_moe", inputs._replace(**int4))
        codes = {
            "gate_up_scale": tensor(128, 1536, 2048 // 32, dtype=torch.uint8),
            "down_scale": tensor(128, 2048, 768 // 32, dtype=torch.uint8),
        }
        mxfp4: dict[str, Any] = (
            {name: int4[name] for name in ("gate_up", "down")} | codes | {"group": 32}
        )
        biased: dict[str, Any] = {
            "gate_up_bias": tensor(128, 1536, dtype=dtype),
            "down_bias": tensor(128, 2048, dtype=dtype),
            "clamp": SwigluOaiParams(1.702, 7.0),
        }
        yield from _call("mxfp4_fused_moe", inputs._replace(**mxfp4))
        yield from _call("fused_moe", inputs._replace(**biased))
        yield from _call("int8_fused_moe", inputs._replace(**int8, **biased))
        yield from _call("mxfp4_fused_moe", inputs._replace(**mxfp4, **biased))
        yield from _call("fused_moe", inputs._replace(activation=GELU_TANH))
        if tokens in (1, 512) and dtype == BF16:
            yield from _experts_without_gate(inputs)
        if tokens in (1, 32) and dtype == BF16:
            local = inputs._replace(global_num_experts=256)
            yield from _call("fused_moe", local)
            yield from _call("w8a8_fused_moe", local._replace(**int8))
            yield from _call("int4_fused_moe", local._replace(**int4))
            yield from _call("mxfp4_fused_moe", local._replace(**mxfp4, **biased))


def _experts_without_gate(inputs: FusedMoEInputs) -> Iterator[Problem]:
    """The first product without rows of a gate: the same matrices in the ops that have it."""
    ungated = inputs._replace(down=tensor(128, 2048, 1536, dtype=BF16), activation=RELU2)
    yield from _call("fused_moe", ungated)
    yield from _call("fused_moe", ungated._replace(gate_up_bias=tensor(128, 1536, dtype=BF16)))
    scales: dict[str, Any] = {
        "gate_up_scale": tensor(128, 1536, dtype=F32), "down_scale": tensor(128, 2048, dtype=F32),
    }  # fmt: skip
    ops = (("int8_fused_moe", INT8), ("w8a8_fused_moe", INT8), ("fp8_fused_moe", FP8))
    for op, dtype in ops:
        matrices: dict[str, Any] = {
            "gate_up": tensor(128, 1536, 2048, dtype=dtype),
            "down": tensor(128, 2048, 1536, dtype=dtype),
        }
        yield from _call(op, ungated._replace(**matrices, **scales))


def routing() -> Iterator[Problem]:
    """Routers of few tokens and many; experts in each order of magnitude."""
    for tokens in (1, 4096):
        yield from _call("router_gemm", tensor(tokens, 2048), tensor(128, 2048))
    for tokens in (1, 32):
        yield from _call("router_gemm", tensor(tokens, 2048), tensor(128, 2048), tensor(128))
    yield from _call("router_gemm", tensor(32, 2048), tensor(128, 2048))
    yield from _call("router_gemm", tensor(2, 2048, dtype=F32), tensor(512, 2048, dtype=F32))
    for tokens, width in ((1, 2048), (4096, 16384)):
        x = tensor(tokens, width)
        yield from _call("shared_expert_gate", x, tensor(1, width), x)
    for tokens, count, sigmoid in ((1, 128, False), (4096, 512, True)):
        logits, bias = tensor(tokens, count, dtype=F32), tensor(count, dtype=F32)
        scored = FusedTopkInputs(
            logits, bias if sigmoid else None, 8, SIGMOID if sigmoid else SOFTMAX
        )
        yield from _call("fused_topk", scored)
        for scores in (1, 2):
            grouped = scored._replace(groups=8, top_groups=4, group_scores=scores)
            yield from _call("fused_topk", grouped)
    yield from _call("fused_topk", scored._replace(local_experts=(128, 256)))
    chosen_in_turn = FusedTopkInputs(
        tensor(32, 16, dtype=F32), None, 2, SPARSE_MIXER, False, jitter=0.01
    )
    yield from _call("fused_topk", chosen_in_turn)
    for tokens, experts_of, block in ((1, 128, 16), (8192, 512, 128)):
        ids = tensor(tokens, 8, dtype=torch.int32)
        yield from _call("moe_align_block_size", ids, block, experts_of)


def cases() -> Iterator[Problem]:
    """The ops' own cases."""
    for op, dtype in itertools.product(BY_CASES, (BF16, F32)):
        module = registry.implementation(op, "triton")
        assert module is not None, f"Triton implements {op}"
        for case in import_module(f"modelmill.ops.{op}").cases("cpu", dtype):
            if registry.backend_serves_args(op, "triton", **case.args):
                yield op, partial(registry.adapt_to_named_args(op, module.run), **case.args)

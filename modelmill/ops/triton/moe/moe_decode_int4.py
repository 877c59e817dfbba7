"""The experts of a few tokens with 4-bit weights: each program reads rows of the chosen experts.

Computes: inner[pair, I] = act(gate) · up of each pair of a token and its expert; out[M, H] =
    Σ topk_weights · (inner · downᵀ + bias) (+ shared)
Dtypes: x and out bfloat16, float16 or float32; packed int4 codes, or e2m1 with e8m0 scales; float32
    sums
Layout: row-major; codes [E, N, K / 2] as in ops/int4_linear.py; scales and offsets [E, N, groups]
Range: any M, meant for few; I and H multiples of 32
Technique: magic-number dequantization of words by byte permutations (PTX), all experts of a token
    in one program (down), its first weights before griddepcontrol.wait, PDL
Used by: grouped_gemm_int4.py, int4_fused_moe.py

A word holds columns of two halves of 32: its low nibbles four neighbours, its high ones the four 16
columns further on. A nibble moved to bit 16 and combined with the exponent of 128 is the float32
128 + code: one byte permutation of a word whose other nibbles are masked. This adds 128 times the
sum of x, which the offsets need anyway. A code of E2M1 is looked up by byte permutations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.triton.common.device import INTERPRETED, next_power_of_two
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.moe.moe_decode import (
    DecodeLaunchConfig,
    activate_and_store,
    count_preload_steps,
    gate_constants,
    load_pair_expert,
    load_token_experts,
    store_weighted_sum,
)
from modelmill.ops.triton.weight_only_gemm.mxfp4_linear import e2m1_values, e8m0_values

ZERO_POINT = 8  # the code of 0 in a symmetric weight
WORD_COLUMNS = 8
PACK_BYTES = 16  # of 32 columns
SMALL_DOWN_MAX_TOKENS, DECODE_CONFIG_MAX_TOKENS = 4, 16
_ASSEMBLY = tl.constexpr(not INTERPRETED)
# bytes 2 of the results are the nibbles, bytes 3 the exponent
_LOW_NIBBLES_TO_BIASED_FLOAT32_ASM = tl.constexpr("""{
    .reg .b32 u;
    and.b32 u, $4, 0x0F0F0F0F;
    prmt.b32 $0, u, 0x43000000, 0x7044;
    prmt.b32 $1, u, 0x43000000, 0x7144;
    prmt.b32 $2, u, 0x43000000, 0x7244;
    prmt.b32 $3, u, 0x43000000, 0x7344;
    }""")
# The upper half of float32 is looked up, its two bytes apart: the three lower bits of a nibble
# choose one of eight bytes. As an index with its sign bit a nibble replicates the sign of 0x80.
# upper, lower: the bytes of the values of the four nibbles in the lower half of ``word``
E2M1_REGISTERS_ASM = ".reg .b32 magnitude, upper, lower, sign, pair, word;"
E2M1_LOOKUP_ASM = """
    and.b32 magnitude, word, 0x77777777;
    prmt.b32 upper, 0x3F3F3F00, 0x40404040, magnitude;
    prmt.b32 lower, 0xC0800000, 0xC0804000, magnitude;
    prmt.b32 sign, 0x80808080, 0x80808080, word;
    shl.b32 sign, sign, 1;
    lop3.b32 upper, upper, sign, 0x80808080, 0xF8;"""


def _two_byte_lookup_asm(byte: int) -> str:
    """PTX: the values of the nibbles of ``byte`` and the next, of those in ``lower``, ``upper``."""
    return f"""
    prmt.b32 pair, lower, upper, 0x5140;
    shl.b32 ${byte}, pair, 16;
    and.b32 ${byte + 4}, pair, 0xFFFF0000;
    prmt.b32 pair, lower, upper, 0x7362;
    shl.b32 ${byte + 1}, pair, 16;
    and.b32 ${byte + 5}, pair, 0xFFFF0000;"""


# $0 … $3: values of the low nibbles of bytes 0 … 3; $4 … $7: of the high ones; $8: the word
_E2M1_TO_FLOAT32_ASM = tl.constexpr(f"""{{
    {E2M1_REGISTERS_ASM}
    mov.b32 word, $8;{E2M1_LOOKUP_ASM}{_two_byte_lookup_asm(0)}
    shr.u32 word, word, 16;{E2M1_LOOKUP_ASM}{_two_byte_lookup_asm(2)}
    }}""")
# (rows, words, warps) of a program: of gate and of up each, and of down; of more than four tokens
GATE_UP_LAUNCH_CONFIG: DecodeLaunchConfig = (16, 256, 4)
DOWN_LAUNCH_CONFIG: DecodeLaunchConfig = (8, 32, 8)
DOWN_LAUNCH_CONFIG_8_TOKENS: DecodeLaunchConfig = (8, 32, 4)
GATE_UP_LAUNCH_CONFIG_E2M1: DecodeLaunchConfig = (8, 128, 4)
DOWN_LAUNCH_CONFIG_E2M1: DecodeLaunchConfig = (8, 64, 4)
DOWN_LAUNCH_CONFIG_E2M1_8_TOKENS: DecodeLaunchConfig = (8, 128, 4)
MANY_TOKENS_LAUNCH_CONFIG: DecodeLaunchConfig = (16, 16, 4)  # float32, or very many experts


def _choose_launch_config(tile: DecodeLaunchConfig, tokens: int, width: int) -> DecodeLaunchConfig:
    """The tile with fewer words for a narrow matrix."""
    rows, words, warps = tile if tokens <= DECODE_CONFIG_MAX_TOKENS else MANY_TOKENS_LAUNCH_CONFIG
    return rows, min(words, max(4, next_power_of_two(width // WORD_COLUMNS))), warps


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op with two launches."""
    x, ids, group = inputs.x, inputs.topk_ids, inputs.group
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    inner_size = inputs.gate_up.shape[1] // 2
    inner = torch.empty((tokens * top_k, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    pdl = pdl_launch_options(x.device, tokens, after_wait=True)

    bias, e2m1 = inputs.gate_up_bias, has_mxfp4_weights(inputs)
    skips = inputs.global_num_experts is not None
    tile = GATE_UP_LAUNCH_CONFIG_E2M1 if e2m1 else GATE_UP_LAUNCH_CONFIG
    rows, words, warps = _choose_launch_config(tile, tokens, hidden)
    weight, scale, offset = inputs.gate_up, inputs.gate_up_scale, inputs.gate_up_offset
    assert scale is not None, "see supports"
    blocks = -(-inner_size // rows)
    sizes = (inner_size, hidden, blocks, x.stride(0), scale.shape[2], weight.shape[2] // PACK_BYTES)
    _gate_up_launcher(
        (tokens * top_k * blocks, 1, 1),
        (
            x, weight.view(torch.int32), scale, scale if offset is None else offset,
            x if bias is None else bias, ids, inner,
        ),
        sizes, sizes,
        (
            top_k, e2m1, offset is not None, bias is not None, skips, *gate_constants(inputs),
            ZERO_POINT, group, hidden % (words * WORD_COLUMNS) == 0, rows, words, pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip

    pdl = pdl_launch_options(x.device, tokens)
    rows, words, warps = _choose_launch_config(
        _down_launch_config(tokens, e2m1), tokens, inner_size
    )
    weight, scale, offset = inputs.down, inputs.down_scale, inputs.down_offset
    assert scale is not None, "see supports"
    bias, shared = inputs.down_bias, inputs.shared
    down_sizes = (hidden, inner_size, scale.shape[2], weight.shape[2] // PACK_BYTES)
    slots = next_power_of_two(top_k)
    _down_launcher(
        (-(-hidden // rows), tokens, 1),
        (
            inner, weight.view(torch.int32), scale, scale if offset is None else offset,
            inner if bias is None else bias, ids, inputs.topk_weights,
            inner if shared is None else shared, out,
        ),
        down_sizes, down_sizes,
        (
            top_k, slots, e2m1, offset is not None, bias is not None, ZERO_POINT,
            group, shared is not None, skips, inner_size % (words * WORD_COLUMNS) == 0, rows,
            words, count_preload_steps((rows, words, warps), slots, 4, inner_size // WORD_COLUMNS),
            pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


def _down_launch_config(tokens: int, e2m1: bool) -> DecodeLaunchConfig:
    if tokens <= SMALL_DOWN_MAX_TOKENS:
        return DOWN_LAUNCH_CONFIG_E2M1 if e2m1 else DOWN_LAUNCH_CONFIG
    return DOWN_LAUNCH_CONFIG_E2M1_8_TOKENS if e2m1 else DOWN_LAUNCH_CONFIG_8_TOKENS


def has_mxfp4_weights(inputs: FusedMoEInputs) -> bool:
    """Whether the weights are MXFP4, whose scales are codes."""
    return inputs.gate_up_scale is not None and inputs.gate_up_scale.dtype == torch.uint8


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, ids_ptr, out_ptr,
    inner, k, blocks, x_stride, groups, runs,
    TOP_K: tl.constexpr, E2M1: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    SKIPS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one
    weight_row = tl.minimum(row, inner - 1)
    pdl_wait_and_trigger(PDL)
    expert, columns = load_pair_expert(ids_ptr, pair, k, SKIPS)
    experts = expert + tl.arange(0, 1)
    x_at = x_ptr + (pair // TOP_K + tl.arange(0, 1)) * x_stride
    inside = tl.arange(0, 1) == 0
    weight_at = weight_ptr + experts * (2 * inner * runs * 4)
    scale_at = scale_ptr + experts * (2 * inner * groups)
    offset_at = offset_ptr + experts * (2 * inner * groups)
    gates = tl.zeros([BLOCK_N, 1, WORDS // 4], tl.float32)
    ups = tl.zeros([BLOCK_N, 1, WORDS // 4], tl.float32)
    for start in range(0, columns // 8, WORDS):
        x = _load_x_and_block_sums(x_at, inside, start, k, E2M1, EVEN, WORDS)
        gates += _load_weights_and_multiply(
            x, weight_at, scale_at, offset_at, weight_row, inside, start, k, groups, runs,
            E2M1, OFFSET, ZERO, GROUP, EVEN, WORDS,
        )  # fmt: skip
        ups += _load_weights_and_multiply(
            x, weight_at, scale_at, offset_at, weight_row + inner, inside, start, k, groups, runs,
            E2M1, OFFSET, ZERO, GROUP, EVEN, WORDS,
        )  # fmt: skip
    gate = tl.sum(tl.reshape(gates, [BLOCK_N, WORDS // 4]), axis=1)
    up = tl.sum(tl.reshape(ups, [BLOCK_N, WORDS // 4]), axis=1)
    activate_and_store(
        out_ptr, bias_ptr, gate, up, expert, pair, row, weight_row, inner, BIAS, GATE, ALPHA, LIMIT
    )


@triton.jit
def _down_kernel(
    inner_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, ids_ptr, routing_ptr, shared_ptr,
    out_ptr, n, k, groups, runs,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, E2M1: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    SKIPS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = EVEN and SLOTS == TOP_K and not SKIPS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, n - 1)
    token = tl.program_id(1).to(tl.int64)
    pair, live, expert, routing = load_token_experts(
        ids_ptr, routing_ptr, token, TOP_K, SLOTS, SKIPS
    )
    weight_at = weight_ptr + expert * (n * runs * 4)
    scale_at = scale_ptr + expert * (n * groups)
    offset_at = offset_ptr + expert * (n * groups)
    inner_at = inner_ptr + pair * k
    first = _load_weights(
        weight_at, scale_at, offset_at, weight_row, live, 0, k, groups, runs,
        OFFSET, GROUP, ALL, WORDS,
    )  # fmt: skip
    if EARLY > 1:
        second = _load_weights(
            weight_at, scale_at, offset_at, weight_row, live, WORDS, k, groups, runs,
            OFFSET, GROUP, ALL, WORDS,
        )  # fmt: skip
    if EARLY > 2:
        third = _load_weights(
            weight_at, scale_at, offset_at, weight_row, live, 2 * WORDS, k, groups, runs,
            OFFSET, GROUP, ALL, WORDS,
        )  # fmt: skip
    pdl_wait_and_trigger(PDL)
    total = _dequantized_products(
        _load_x_and_block_sums(inner_at, live, 0, k, E2M1, ALL, WORDS), first, E2M1, OFFSET, ZERO
    )
    if EARLY > 1:
        x = _load_x_and_block_sums(inner_at, live, WORDS, k, E2M1, ALL, WORDS)
        total += _dequantized_products(x, second, E2M1, OFFSET, ZERO)
    if EARLY > 2:
        x = _load_x_and_block_sums(inner_at, live, 2 * WORDS, k, E2M1, ALL, WORDS)
        total += _dequantized_products(x, third, E2M1, OFFSET, ZERO)
    for start in range(EARLY * WORDS, k // 8, WORDS):
        x = _load_x_and_block_sums(inner_at, live, start, k, E2M1, ALL, WORDS)
        total += _load_weights_and_multiply(
            x, weight_at, scale_at, offset_at, weight_row, live, start, k, groups, runs,
            E2M1, OFFSET, ZERO, GROUP, ALL, WORDS,
        )  # fmt: skip
    out = tl.sum(total, axis=2)
    if BIAS:
        out += tl.load(bias_ptr + (expert * n)[None, :] + weight_row[:, None]).to(tl.float32)
    store_weighted_sum(out_ptr, shared_ptr, out, routing, token, row, n, SHARED)


@triton.jit
def _load_weights_and_multiply(
    x, weight_at, scale_at, offset_at, row, live, start, k, groups, runs,
    E2M1: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Products of weights that are loaded here; arguments as of the two steps."""
    weights = _load_weights(
        weight_at, scale_at, offset_at, row, live, start, k, groups, runs,
        OFFSET, GROUP, EVEN, WORDS,
    )  # fmt: skip
    return _dequantized_products(x, weights, E2M1, OFFSET, ZERO)


@triton.jit
def _load_x_and_block_sums(
    x_at, live, start, k, E2M1: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """The columns of words [S, WORDS, 8], and their float32 sums by runs [S, WORDS / 4].

    A word's columns are in the order of its bytes, each byte's low nibble first. x_at: [S] rows of
    x; live: [S].
    """
    word = start + tl.arange(0, WORDS)
    column = word // 4 * 32 + word % 4 * 4
    source = x_at[:, None, None] + column[None, :, None] + tl.arange(0, 4)[None, None, :]
    if EVEN:
        low = tl.load(source)
        high = tl.load(source + 16)
    else:
        there = (live[:, None] & (word // 4 * 32 < k)[None, :])[:, :, None]
        low = tl.load(source, mask=there, other=0.0)
        high = tl.load(source + 16, mask=there, other=0.0)
    sums = tl.sum(low.to(tl.float32) + high.to(tl.float32), axis=2)
    sums = tl.sum(tl.reshape(sums, [sums.shape[0], WORDS // 4, 4]), axis=2)
    if not E2M1:  # else converted behind the exchange between threads, of half as many bytes
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    return tl.reshape(tl.join(low, high), [low.shape[0], WORDS, 8]), sums


@triton.jit
def _load_weights(
    weight_at, scale_at, offset_at, row, live, start, k, groups, runs,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Words [N, S, WORDS], and scales and offsets [N, S, WORDS / 4] of runs of 32 columns.

    A row has ``runs`` runs of four words: written so, the compiler sees that each is one load of 16
    bytes. weight_at, scale_at, offset_at: [S] matrices; row: [N] rows of each; live: [S].
    """
    word = start + tl.arange(0, WORDS)
    run = start // 4 + tl.arange(0, WORDS // 4)
    local = (row * runs * 4)[:, None, None] + word[None, None, :]
    grid = (row * groups)[:, None, None] + (run * 32 // GROUP)[None, None, :]
    words_at = weight_at[None, :, None] + local
    scales_at = scale_at[None, :, None] + grid
    if EVEN:
        words = tl.load(words_at, eviction_policy="evict_first")
        scale = tl.load(scales_at)
    else:
        words_there = (live[:, None] & (word // 4 * 32 < k)[None, :])[None, :, :]
        runs_there = (live[:, None] & (run * 32 < k)[None, :])[None, :, :]
        words = tl.load(words_at, mask=words_there, other=0)
        scale = tl.load(scales_at, mask=runs_there, other=0)
    offset = scale
    if OFFSET:
        offsets_at = offset_at[None, :, None] + grid
        if EVEN:
            offset = tl.load(offsets_at)
        else:
            offset = tl.load(offsets_at, mask=runs_there, other=0.0)
    return words, scale, offset


@triton.jit
def _dequantized_products(x, weights, E2M1: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr):
    """Dequantized products of runs of 32 columns: [N, S, WORDS / 4].

    x: of _load_x_and_block_sums; weights: of _load_weights.
    """
    words, scale, offset = weights
    columns, sums = x
    RUNS: tl.constexpr = scale.shape[2]
    if E2M1:
        low0, low1, low2, low3, high0, high1, high2, high3 = _e2m1_to_float32(words)
    else:
        low0, low1, low2, low3 = _low_nibbles_to_biased_float32(words)
        high0, high1, high2, high3 = _low_nibbles_to_biased_float32(words >> 4)
    codes = tl.join(_join4(low0, low1, low2, low3), _join4(high0, high1, high2, high3))
    shape: tl.constexpr = [words.shape[0], words.shape[1], RUNS, 32]
    products = tl.reshape(codes, [words.shape[0], words.shape[1], words.shape[2], 8]) * columns[
        None, :, :, :
    ].to(tl.float32)
    part = tl.sum(tl.reshape(products, shape), axis=3)
    if E2M1:
        return part * e8m0_values(scale)
    scale = scale.to(tl.float32)
    if OFFSET:
        offset = tl.fma(scale, -128.0, offset.to(tl.float32))
    else:
        offset = -(ZERO + 128) * scale
    return tl.fma(part, scale, offset * sums[None, :, :])


@triton.jit
def _e2m1_to_float32(words):
    """The values of the low nibbles of each byte, then of the high ones: eight float32."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            _E2M1_TO_FLOAT32_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words],
            dtype=(
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
            ),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505  Triton needs both branches
        return (
            e2m1_values(words & 15), e2m1_values((words >> 8) & 15),
            e2m1_values((words >> 16) & 15), e2m1_values((words >> 24) & 15),
            e2m1_values((words >> 4) & 15), e2m1_values((words >> 12) & 15),
            e2m1_values((words >> 20) & 15), e2m1_values((words >> 28) & 15),
        )  # fmt: skip


@triton.jit
def _low_nibbles_to_biased_float32(words):
    """128 + the code in the low nibble of each byte: four float32."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            _LOW_NIBBLES_TO_BIASED_FLOAT32_ASM, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505  Triton needs both branches
        return (
            _nibble_to_biased_float32(words << 16),
            _nibble_to_biased_float32(words << 8),
            _nibble_to_biased_float32(words),
            _nibble_to_biased_float32(words >> 8),
        )


@triton.jit
def _nibble_to_biased_float32(shifted):
    """128 + the code in bits 16 to 19, as float32."""
    return ((shifted & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _join4(first, second, third, fourth):
    """Four of [N, S, W] → [N, S, W, 4]."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, [first.shape[0], first.shape[1], first.shape[2], 4])


_gate_up_launcher, _down_launcher = CachedLauncher(_gate_up_kernel), CachedLauncher(_down_kernel)

"""Custom all-reduce and all-gather between GPUs of one host, one kernel each, over peer memory.

Computes: the sum of x[T, H] over the ranks, optionally with residual add and RMSNorm; and an
    all-gather
Dtypes: bfloat16, float16 or float32
Layout: row-major; peer buffers of 64-bit words, each half value and half exchange number
Range: any T; the ranks of one host
Technique: one-shot exchange over NVLink peer memory without fences, PDL
Used by: peer_buffers.py

Every 32-bit word is stored together with the number of its exchange in one 64-bit store. A reader
that sees the right number has the right word, so neither fences nor signals are needed. A program
writes its row to every rank (including its own, so that all ranks add in the same order and get
identical sums), then reads what the other ranks wrote to its own memory.

Program p counts its exchanges in ``counters[p]``; odd and even exchanges use different regions. A
region is written again two exchanges later: by then every rank has taken part in the exchange
between, so it has read this one. More than MAX_PROGRAMS exchanges are done in rounds. All programs
of a kernel must be resident at once, because they wait for the same programs of other ranks.

Buffer of a rank: [2, ranks, MAX_PROGRAMS, region] 64-bit words. ``abort``: one word in host memory;
once it is not 0, programs stop waiting (a rank has died, the results are discarded).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

# per kernel; each exchanges one row of a sum or one block of a gather at a time
MAX_PROGRAMS = 128
SPINS_PER_ABORT_CHECK = 0x3FFF  # polls of the buffer between two polls of ``abort``
# words per block of a gather: small if one round suffices, else large
_GATHER_BLOCK_WORD_CHOICES = (1024, 4096)
_WORDS_PER_WAIT = 4  # words per thread and wait


@dataclass(frozen=True)
class AllReduceBuffers:
    """Peer buffers of a rank.

    Attributes:
        rank: this rank.
        addresses: every rank's buffer, as mapped by this rank.
        counters: [MAX_PROGRAMS] int32.
        abort: [1] int32, pinned host memory.
        region_words: 64-bit words of a program's region.
    """

    rank: int
    addresses: tuple[int, ...]
    counters: torch.Tensor
    abort: torch.Tensor
    region_words: int

    @staticmethod
    def count_buffer_words(ranks: int, region: int) -> int:
        """Number of 64-bit words in a rank's buffer."""
        return 2 * ranks * MAX_PROGRAMS * region


def all_reduce_rows(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    buffers: AllReduceBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum x [T, H] over all ranks, optionally followed by residual add and RMSNorm.

    Args:
        x: this rank's partial sums.
        norm: (residual, weight, eps) or None; the residual is overwritten with the new one.
        buffers: peer buffers.

    Returns:
        (sum, sum), or with ``norm`` what add_rms_norm of the sum returns.
    """
    ranks, region = len(buffers.addresses), buffers.region_words
    rows, width = x.shape
    out = torch.empty_like(x)
    words = width * x.element_size() // 4
    block = max(next_power_of_two(words), 32 * _WORDS_PER_WAIT)
    warps = min(16, block // (32 * _WORDS_PER_WAIT))
    residual, weight, eps = (out, out, 0.0) if norm is None else norm
    asm, constraints = _wait_and_add_asm(
        ranks, _ptx_type_name(x), _WORDS_PER_WAIT, 8 * MAX_PROGRAMS * region
    )
    _all_reduce_kernel[(min(rows, MAX_PROGRAMS),)](
        x, residual, weight, out, buffers.addresses, buffers.addresses[buffers.rank],
        buffers.counters, buffers.abort,
        buffers.rank, rows, words, eps,
        NORM=norm is not None, KIND=_ptx_type_name(x), RANKS=ranks, REGION=region,
        PROGRAMS=MAX_PROGRAMS, BLOCK=block,
        ASM=asm, CONSTRAINTS=constraints, PACK=_WORDS_PER_WAIT, num_warps=warps,
        **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return out, (out if norm is None else residual)


def all_gather_columns(
    x: torch.Tensor, starts: torch.Tensor, widths: tuple[int, ...], buffers: AllReduceBuffers
) -> torch.Tensor:
    """Gather the columns of all ranks: [T, this rank's columns] → [T, sum(widths)].

    Args:
        x: this rank's columns.
        starts: [ranks + 1] int32, first column of each rank; even for 16-bit types.
        widths: columns of each rank.
        buffers: peer buffers.
    """
    ranks, region = len(buffers.addresses), buffers.region_words
    per = 4 // x.element_size()
    width, rows = sum(widths), x.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    widest = max(widths) // per
    block = (
        _GATHER_BLOCK_WORD_CHOICES[0]
        if rows * -(-widest // _GATHER_BLOCK_WORD_CHOICES[0]) <= MAX_PROGRAMS
        else min(_GATHER_BLOCK_WORD_CHOICES[1], region)
    )
    blocks = -(-widest // block)
    asm, constraints = _wait_and_add_asm(1, "word", _WORDS_PER_WAIT, 0)
    _all_gather_kernel[(min(rows * blocks, MAX_PROGRAMS),)](
        x, out, starts, buffers.addresses, buffers.addresses[buffers.rank], buffers.counters,
        buffers.abort,
        buffers.rank, rows * blocks, blocks, x.shape[1] // per, width // per,
        PER=per, RANKS=ranks, REGION=region, PROGRAMS=MAX_PROGRAMS, BLOCK=block,
        ASM=asm, CONSTRAINTS=constraints, PACK=_WORDS_PER_WAIT,
        num_warps=min(block // (32 * _WORDS_PER_WAIT), 16),
        **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return out


def _ptx_type_name(x: torch.Tensor) -> str:
    return {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[x.dtype]


@functools.lru_cache
def _wait_and_add_asm(ranks: int, word_type: str, pack: int, stride: int) -> tuple[str, str]:
    """PTX that waits for ``pack`` words of every rank and adds them, and its constraints.

    Inputs: addresses (of rank 0; the other ranks follow at ``stride`` bytes), number of the
    exchange, address of ``abort``. Outputs: sums of the low and high halves (for 32-bit values the
    first is the sum); for word_type "word" the word itself.
    """
    two = word_type in ("f16", "bf16")
    outs = pack * (2 if two else 1)
    address = [f"${outs + i}" for i in range(pack)]
    number, stop = f"${outs + pack}", f"${outs + 2 * pack}"
    names = [(r, i) for r in range(ranks) for i in range(pack)]
    lines = ["{", ".reg .pred ok, more;", ".reg .b32 n, t, bad;", ".reg .b16 h, g;", ".reg .f32 x;"]
    lines += [f".reg .b64 v{r}_{i}; .reg .b32 d{r}_{i}, f{r}_{i};" for r, i in names]
    lines += ["mov.u32 n, 0;", "LOOK:", "mov.u32 bad, 0;"]
    lines += [f"ld.relaxed.sys.global.b64 v{r}_{i}, [{address[i]}+{r * stride}];" for r, i in names]
    for r, i in names:
        lines += [
            f"mov.b64 {{d{r}_{i}, f{r}_{i}}}, v{r}_{i};",
            f"xor.b32 t, f{r}_{i}, {number};",
            "or.b32 bad, bad, t;",
        ]
    lines += [
        "setp.eq.u32 ok, bad, 0;",
        "@ok bra DONE;",
        "add.u32 n, n, 1;",
        f"and.b32 t, n, {SPINS_PER_ABORT_CHECK};",
    ]
    lines += [
        "setp.ne.u32 more, t, 0;",
        "@more bra LOOK;",
        f"ld.relaxed.sys.global.u32 t, [{stop}];",
    ]
    lines += ["setp.eq.u32 more, t, 0;", "@more bra LOOK;", "DONE:"]
    for i in range(pack):
        if word_type == "word":
            lines.append(f"mov.b32 ${i}, d0_{i};")
            continue
        lines.append(f"mov.f32 ${i}, 0f00000000;")
        if two:
            lines.append(f"mov.f32 ${pack + i}, 0f00000000;")
        for r in range(ranks):
            lines += _add_word_asm(word_type, f"d{r}_{i}", f"${i}", f"${pack + i}")
    lines.append("}")
    out = "=r" if word_type == "word" else "=f"
    parts = [out] * outs + ["l"] * pack + ["r"] * pack + ["l"] * pack
    return "\n".join(lines), ",".join(parts)


def _add_word_asm(word_type: str, word: str, low: str, high: str) -> list[str]:
    """PTX that adds a word's values as float32."""
    if word_type == "f32":
        return [f"mov.b32 x, {word};", f"add.f32 {low}, {low}, x;"]
    if word_type == "bf16":
        return [
            f"shl.b32 t, {word}, 16;", "mov.b32 x, t;", f"add.f32 {low}, {low}, x;",
            f"and.b32 t, {word}, 0xFFFF0000;", "mov.b32 x, t;", f"add.f32 {high}, {high}, x;",
        ]  # fmt: skip
    return [
        f"mov.b32 {{h, g}}, {word};", "cvt.f32.f16 x, h;", f"add.f32 {low}, {low}, x;",
        "cvt.f32.f16 x, g;", f"add.f32 {high}, {high}, x;",
    ]  # fmt: skip


@triton.jit(do_not_specialize=["rank", "rows"])
def _all_reduce_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, own, count_ptr, stop_ptr, rank, rows,
    words, eps,
    NORM: tl.constexpr, KIND: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    inside = word < words
    # threads past the end send and wait for the last word, like the thread that owns it
    at = tl.minimum(word, words - 1)
    x32, out32 = x_ptr.to(tl.pointer_type(tl.int32)), out_ptr.to(tl.pointer_type(tl.int32))
    residual32 = residual_ptr.to(tl.pointer_type(tl.int32))
    stop = stop_ptr.to(tl.int64) + at.to(tl.int64) * 0
    if NORM:
        weight = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + at)
    pdl_wait_and_trigger(PDL)
    number = tl.load(count_ptr + program)
    for row in range(program, rows, PROGRAMS):
        number += 1
        word_index = row * words + at
        partial = tl.load(x32 + word_index)
        region = _program_region_offset(number, program, RANKS, REGION, PROGRAMS)
        _send_words(addresses, region + rank * (PROGRAMS * REGION) + at, partial, number, RANKS)
        if NORM:
            residual = tl.load(residual32 + word_index)
        source = own + 8 * (region + at)
        expected = number + at * 0
        if KIND == "f32":
            low = tl.inline_asm_elementwise(
                ASM,
                CONSTRAINTS,
                [source, expected, stop],
                dtype=tl.float32,
                is_pure=False,
                pack=PACK,
            )
            if NORM:
                low += residual.to(tl.float32, bitcast=True)
                tl.store(residual32 + word_index, low.to(tl.int32, bitcast=True), mask=inside)
                scale = tl.rsqrt(tl.sum(tl.where(inside, low * low, 0.0)) / words + eps)
                low = low * scale * weight.to(tl.float32, bitcast=True)
            tl.store(out32 + word_index, low.to(tl.int32, bitcast=True), mask=inside)
        else:
            low, high = tl.inline_asm_elementwise(
                ASM,
                CONSTRAINTS,
                [source, expected, stop],
                dtype=(tl.float32, tl.float32),
                is_pure=False,
                pack=PACK,
            )
            if NORM:
                total = _pack_halves(
                    low + _low_half(residual, out_ptr),
                    high + _high_half(residual, out_ptr),
                    out_ptr,
                )
                tl.store(residual32 + word_index, total, mask=inside)
                # rounded to the residual's dtype before the statistics, as add_rms_norm does
                low, high = _low_half(total, out_ptr), _high_half(total, out_ptr)
                scale = tl.rsqrt(
                    tl.sum(tl.where(inside, low * low + high * high, 0.0)) / (2 * words) + eps
                )
                normal = _pack_halves(low * scale, high * scale, out_ptr)
                low = _low_half(normal, out_ptr) * _low_half(weight, out_ptr)
                high = _high_half(normal, out_ptr) * _high_half(weight, out_ptr)
            tl.store(out32 + word_index, _pack_halves(low, high, out_ptr), mask=inside)
        # no thread sends the next words before all threads have read these
        tl.debug_barrier()
    tl.store(count_ptr + program, number)


@triton.jit(do_not_specialize=["rank", "items", "blocks", "words"])
def _all_gather_kernel(
    x_ptr, out_ptr, starts_ptr, addresses, own, count_ptr, stop_ptr, rank, items, blocks, words,
    width,
    PER: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    x32, out32 = x_ptr.to(tl.pointer_type(tl.int32)), out_ptr.to(tl.pointer_type(tl.int32))
    stop = stop_ptr.to(tl.int64) + word.to(tl.int64) * 0
    pdl_wait_and_trigger(PDL)
    number = tl.load(count_ptr + program)
    for item in range(program, items, PROGRAMS):
        number += 1
        row = item // blocks
        at = item % blocks * BLOCK + word
        local = tl.load(x32 + row * words + at, mask=at < words, other=0)
        region = _program_region_offset(number, program, RANKS, REGION, PROGRAMS)
        _send_words(addresses, region + rank * (PROGRAMS * REGION) + word, local, number, RANKS)
        expected = number + word * 0
        for peer in tl.static_range(RANKS):
            source = own + 8 * (region + peer * (PROGRAMS * REGION) + word)
            received = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [source, expected, stop], dtype=tl.int32, is_pure=False, pack=PACK
            )
            first, last = tl.load(starts_ptr + peer) // PER, tl.load(starts_ptr + peer + 1) // PER
            tl.store(out32 + row * width + first + at, received, mask=at < last - first)
        tl.debug_barrier()
    tl.store(count_ptr + program, number)


@triton.jit
def _program_region_offset(
    number, program, RANKS: tl.constexpr, REGION: tl.constexpr, PROGRAMS: tl.constexpr
):
    """First word of the region of a program for the words that rank 0 sends in this exchange."""
    return ((number & 1).to(tl.int64) * (RANKS * PROGRAMS) + program) * REGION


@triton.jit
def _send_words(addresses, at, words, number, RANKS: tl.constexpr):
    """Store words with the exchange's number at word ``at`` of every rank's buffer."""
    for peer in tl.static_range(RANKS):
        target = addresses[peer] + 8 * at
        tl.inline_asm_elementwise(
            "{ .reg .b64 v; mov.b64 v, {$2, $3}; st.relaxed.sys.global.b64 [$1], v; mov.u32 $0, "
            "0; }",
            "=r,l,r,r",
            [target, words, number + words * 0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _low_half(word, like_ptr):
    """Value in the lower half of a word, as float32."""
    half = (word & 0xFFFF).to(tl.int16)
    return half.to(like_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(word, like_ptr):
    """Value in the upper half of a word, as float32."""
    half = (word >> 16).to(tl.int16)
    return half.to(like_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _pack_halves(low, high, like_ptr):
    """Round two values to the type of ``like_ptr`` and pack them into one word."""
    a = low.to(like_ptr.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    b = high.to(like_ptr.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    return (b << 16) | a

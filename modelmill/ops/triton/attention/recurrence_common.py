"""A sequence's state, its tokens in whole chunks and around them, and arithmetic of recurrences.

Computes: the state in front of a part of a step, the bounds of whole chunks, the chunk that starts
    in a window, softplus, decays in a chunk, products of a float32 and a 16-bit operand
Dtypes: float32; running sums of a chunk float64
Layout: registers
Range: chunks of up to 16 tokens
Technique: no integer is read on the host, so that steps with prompts can be captured as well
Used by: gated_delta_rule.py, ssd_scan.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from modelmill.ops.recurrent_metadata import RecurrentStepMetadata
from modelmill.ops.triton.common.device import is_amd, next_power_of_two

MAX_KERNEL_CHUNK = 16  # operands of larger ones would leave room for few programs in an SM
MIN_DOT_SIZE = 16  # least size of an operand of tl.dot
ACCUMULATOR_ROWS_PER_WARP = 16  # of an accumulator in a warp
MAX_CHUNK_STATE_ROWS = (
    32  # of a state in a program that computes chunks: fewer read the operands more often
)
MAX_STATE_WIDTH_PER_WARP = 128  # of 16 rows in a warp's registers, beside what is added to them
# Float32 products on tensor cores, to about float32's precision; AMD's compiler has only the other.
PRECISION = "ieee" if is_amd() else "tf32x3"
# Which tokens of a sequence a launch computes. TOKENS_BEFORE_CHUNKS: those in front of its whole
# chunks, or all if there is none.
ALL_TOKENS, TOKENS_BEFORE_CHUNKS, TOKENS_OF_CHUNKS, TOKENS_BEHIND_CHUNKS = (
    tl.constexpr(part) for part in range(4)
)


def compiled_chunk_size(chunk: int, *, decode: bool) -> int:
    """The chunk that a kernel is compiled for, a divisor of the step's; 0: single tokens alone."""
    return 0 if decode or chunk == 1 else min(chunk, MAX_KERNEL_CHUNK)


def launch_tokens_and_chunks(
    x: torch.Tensor,
    width: int,
    rows: RecurrentStepMetadata,
    run_tokens: Callable[[torch.Tensor, Any, int], None],
    run_chunks: Callable[[torch.Tensor, int], None],
) -> torch.Tensor:
    """Launch the parts of a step in their order; returns the outputs [T, width] float32.

    Args:
        x: [T, …], the step's tokens.
        width: values of a token's output.
        rows: the sequences.
        run_tokens: (outputs, part, chunk), the tokens of a part of each sequence, one by one.
        run_chunks: (outputs, chunk), the whole chunks, and zeros into the outputs of padding.
    """
    chunk = compiled_chunk_size(rows.chunk, decode=rows.is_decode)
    make = torch.empty if rows.is_decode or chunk else torch.zeros  # a prompt may be padded
    out = make((len(x), width), dtype=torch.float32, device=x.device)
    if chunk == 0:
        run_tokens(out, ALL_TOKENS, chunk)
    else:
        run_tokens(out, TOKENS_BEFORE_CHUNKS, chunk)
        run_chunks(out, chunk)
        run_tokens(out, TOKENS_BEHIND_CHUNKS, chunk)
    return out


class ChunkLaunch(NamedTuple):
    """How the whole chunks of a sequence are computed.

    Attributes:
        dtype: Of operands on tensor cores. bfloat16 has the exponents of states; float16 has not.
        rows: Rows of a state (columns of the delta rule's) in a program.
        own_rows: Whether a warp has whole rows, which then become a left operand within a thread's
            registers. Else the warps share all rows.
        warps: Warps of a program.
        stages: Pipeline stages. Triton keeps one less in shared memory: from 3 on, operands are
            loaded while those of another chunk are multiplied.
        prepare_warps: Warps of a program of the launch in front.
    """

    dtype: torch.dtype
    rows: int
    own_rows: bool
    warps: int
    stages: int
    prepare_warps: int


def select_chunk_launch_config(tokens: torch.Tensor, count: int, width: int) -> ChunkLaunch:
    """The launch for states of so many rows, each so wide.

    No choice for bfloat16 and widths of the models spills more than a few registers.
    """
    rows = max(ACCUMULATOR_ROWS_PER_WARP, min(MAX_CHUNK_STATE_ROWS, next_power_of_two(count)))
    if tokens.dtype is not torch.bfloat16:
        if width > MAX_STATE_WIDTH_PER_WARP:
            return ChunkLaunch(torch.float32, ACCUMULATOR_ROWS_PER_WARP, False, 8, 1, 4)
        return ChunkLaunch(torch.float32, rows, False, 8, 3, 4)
    if width > MAX_STATE_WIDTH_PER_WARP:
        return ChunkLaunch(torch.bfloat16, rows, False, 4, 3, 2)
    return ChunkLaunch(torch.bfloat16, rows, True, rows // ACCUMULATOR_ROWS_PER_WARP, 3, 1)


@triton.jit
def load_token_range(
    start_ptr, position_ptr, snapshot_end_ptr, sequence, PART: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The tokens [begin, stop) of a sequence that a launch computes.

    Returns:
        Begin, stop, position of the first of them, and the token in front of which the snapshot is;
        it may be elsewhere.
    """
    start = tl.load(start_ptr + sequence).to(tl.int64)
    stop = tl.load(start_ptr + sequence + 1).to(tl.int64)
    first = tl.load(position_ptr + start, mask=stop > start, other=0)
    end = tl.load(snapshot_end_ptr + sequence)
    begin, kept = start, end - first + start
    if PART != ALL_TOKENS:
        a, last = whole_chunk_bounds(start, stop, first, end, CHUNK)
        if PART == TOKENS_BEFORE_CHUNKS:
            stop = tl.where(last > a, a, stop)
        elif PART == TOKENS_OF_CHUNKS:
            begin, stop = a, last
        else:
            begin = tl.where(last > a, last, stop)
    return begin, stop, first + begin - start, kept


@triton.jit
def load_state_and_store_snapshot(
    state_ptr, slot_ptr, snapshot_slot_ptr, sequence, slot_stride, place, inside,
               first, is_snapshot):  # fmt: skip
    """The state of a sequence in front of a part of its tokens.

    Args:
        state_ptr: states by slot, slot_stride apart.
        slot_ptr: the slot of each sequence.
        snapshot_slot_ptr: the slots of the snapshots.
        sequence: number of the sequence.
        slot_stride: values from slot to slot.
        place: where in a slot the program's part of the state is.
        inside: which of it exists.
        first: position of the first token; at 0 the slot holds another sequence's state.
        is_snapshot: whether this state is the snapshot; then it is stored.

    Returns:
        The state, where it lies, and where its snapshot lies.
    """
    own = state_ptr + tl.load(slot_ptr + sequence) * slot_stride + place
    snapshot = state_ptr + tl.load(snapshot_slot_ptr + sequence) * slot_stride + place
    state = tl.load(own, mask=inside, other=0.0)
    state = tl.where(first > 0, state, 0.0)
    if is_snapshot:
        tl.store(snapshot, state, mask=inside)
    return state, own, snapshot


@triton.jit
def dot_split_mantissa(a, b, PRECISION: tl.constexpr, ONE_SUM: tl.constexpr):
    """Product of a float32 a and b; with a bfloat16 b in two terms, 16 bits of a's mantissa.

    ONE_SUM: both terms in one accumulator. Else the terms of few columns do not wait for each
    other; tl.fma since Triton's compiler makes a sum written with + an accumulator.
    """
    if b.dtype != tl.bfloat16:
        product = tl.dot(a, b, input_precision=PRECISION)
    elif ONE_SUM:
        high, low = split_mantissa(a)
        product = tl.dot(high, b, tl.dot(low, b))
    else:
        high, low = split_mantissa(a)
        product = tl.fma(tl.dot(low, b), 1.0, tl.dot(high, b))
    return product


@triton.jit
def split_mantissa(a):
    """The upper 8 bits of a's mantissa and the rest of it, rounded; bfloat16.

    Cut off and not rounded: a conversion whose result is read as float32 again is slow.
    """
    high = (a.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (a - high).to(tl.bfloat16)


@triton.jit
def decay_and_add_to_state(state, decay, added):
    """State · decay + added, rounded to nearest.

    As the accumulator of a product the state would be rounded towards zero by the tensor cores in
    each of its steps. A sum written with + is made such an accumulator by Triton's compiler.
    """
    return tl.fma(state, decay, added)


@triton.jit
def whole_chunk_bounds(start, stop, first, end, CHUNK: tl.constexpr):
    """The tokens [a, b) of a sequence that are whole chunks at multiples of CHUNK.

    Args:
        start: first token of the sequence.
        stop: behind its last.
        first: position of the first token.
        end: position of the snapshot; one inside of a chunk ends the chunks.
        CHUNK: tokens of a chunk.
    """
    a = tl.minimum(start + (CHUNK - first % CHUNK) % CHUNK, stop)
    b = a + (stop - a) // CHUNK * CHUNK
    kept = end - first + start
    inside = (kept > a) & (kept < b) & (end % CHUNK != 0)
    return a, tl.where(inside, a + (kept - a) // CHUNK * CHUNK, b)


@triton.jit
def find_chunk_start_in_window(start_ptr, position_ptr, window, sequences, CHUNK: tl.constexpr):
    """The token in [window, window + CHUNK) at which a whole chunk starts; −1 if there is none.

    There is at most one: chunks of one sequence do not overlap, and a whole one is CHUNK long.
    """
    chosen = tl.full((), -1, tl.int64)
    for base in range(0, sequences, 64):
        index = base + tl.arange(0, 64)
        start = tl.load(start_ptr + index, mask=index < sequences, other=0).to(tl.int64)
        stop = tl.load(start_ptr + index + 1, mask=index < sequences, other=0).to(tl.int64)
        first = tl.load(position_ptr + start, mask=stop > start, other=0)
        a = start + (CHUNK - first % CHUNK) % CHUNK
        token = a + tl.maximum(window - a + CHUNK - 1, 0) // CHUNK * CHUNK
        whole = (stop > start) & (token < window + CHUNK) & (token + CHUNK <= stop)
        chosen = tl.maximum(chosen, tl.max(tl.where(whole, token, -1)))
    return chosen


@triton.jit
def zero_padding_outputs(
    out_ptr, start_ptr, window, sequences, tokens, heads, head, last_head, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Zeros into the outputs [tokens, heads · SIZE] of a window's tokens behind all sequences."""
    used = tl.load(start_ptr + sequences)
    if window + CHUNK > used:
        i, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK)
        row = window + i
        padding = (row >= used) & (row < tokens) & (i < CHUNK)
        mask = padding[:, None] & (d < SIZE)[None, :]
        for each in range(head, last_head):
            at = (row[:, None] * heads + each) * SIZE + d[None, :]
            tl.store(out_ptr + at, tl.zeros([BLOCK_T, BLOCK], tl.float32), mask=mask)


@triton.jit
def softplus(x):
    """log(1 + eˣ), with the relative precision of float32 for small values, too."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) · e / (u − 1): the rounding of u cancels (Goldberg 1991, theorem 4)
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def decays_within_chunk(log_decay, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Decays within a chunk, from the log decays [BLOCK], which are 0 from CHUNK on.

    Returns:
        From token j to token i ≥ j [BLOCK, BLOCK], else 0; from the chunk's start to each token
        [BLOCK]; from each token to the end [BLOCK]; from start to end.
    """
    i = tl.arange(0, BLOCK)
    total = tl.cumsum(log_decay.to(tl.float64), 0)
    whole = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
    lower = i[:, None] >= i[None, :]
    between = (total[:, None] - total[None, :]).to(tl.float32)
    between = tl.where(lower, tl.exp(tl.where(lower, between, 0.0)), 0.0)
    since_start, to_end = tl.exp(total.to(tl.float32)), tl.exp((whole - total).to(tl.float32))
    return between, since_start, to_end, tl.exp(whole.to(tl.float32))

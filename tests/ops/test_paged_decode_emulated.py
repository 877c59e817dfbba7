"""paged_decode8.cu and paged_decode16.cu on a CPU, launched by their own Python, against float64.

Caches, scales and page tables hold what is no number, or names nothing, wherever no query may look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from modelmill.ops.cuda.attention import paged_decode8, paged_decode16
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.paged_attention import paged_attention as reference
from tests.ops import test_cuda_paged_decode8 as of_8
from tests.ops import test_cuda_paged_decode16 as of_16
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, HF = torch.bfloat16, torch.float16
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 100)


def error(emulator: Emulator, args: dict[str, Any], splits: int) -> float:
    """Of the rows that the kernel fills, in the norm; the others must stay as they were."""
    args["scale"] /= 4  # so that every key counts
    q, scales = args["q"], [args[name] for name in ("k_scale", "v_scale") if name in args]
    caches, indices = (
        (args["k_cache"], args["v_cache"], *scales),
        (args["block_tables"], args["query_start"]),
    )
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype)
    emulator.preceding_writes = lambda name, arguments: memory_ranges(*caches, out)
    module: Any = paged_decode8 if scales else paged_decode16
    numbers = (args["max_context"], args["scale"], args["window"])
    mods = {"sinks": args["score_mods"].sinks} if "score_mods" in args else {}
    module.run(q, caches, (*indices, args["context_lens"]), *numbers, out, **mods)
    pairs = len(args["context_lens"]) * args["k_cache"].shape[1]
    assert emulator.launched[-1][1] == pairs * splits
    if scales:
        floats = ("q", "k_scale", "v_scale")
        wide = {k: v.double() if k in floats else v for k, v in args.items()}
        truth = reference(PagedAttentionInputs(**wide))
    else:
        truth = of_16._truth(args)
    single = args["query_start"].diff() == 1
    rows = args["query_start"][:-1][single].long()
    assert out[[row for row in range(len(out)) if row not in rows.tolist()]].isnan().all()
    return float((out[rows].double() - truth[rows]).norm() / truth[rows].norm())


class Case(NamedTuple):
    """One query a sequence, over so many keys; heads as the arguments of the kernel's own tests
    take them.
    """

    lengths: Sequence[int]
    heads: Any
    dim: int
    page: int
    dtype: torch.dtype
    window: int | None
    multiprocessors: int
    splits: int


def case_error(emulator: Emulator, of: Any, case: Case, **mods: bool) -> float:
    """``error`` of a case. of: the kernel's own tests, whose arguments it is made of."""
    emulator.num_sms = case.multiprocessors
    lengths = [(1, length) for length in case.lengths]
    args = of._arguments(
        lengths, case.heads, case.dim, case.page, case.dtype, case.window, "cpu", **mods
    )
    return error(emulator, args, case.splits)


@pytest.mark.parametrize(
    "case",
    [
        Case([1, 17, 0, 33, 100], (2, 1), 64, 8, BF, None, 1, 1),
        Case([150, 7], (4, 1), 128, 16, HF, None, 4, 2),
        Case([240], (3, 1), 128, 32, BF, 170, 2, 2),
        pytest.param(Case(EDGES, (8, 2), 64, 16, HF, 33, 1, 1), marks=slow),
        pytest.param(Case(EDGES, (1, 1), 80, 16, BF, None, 1, 1), marks=slow),
        pytest.param(Case(EDGES, (7, 1), 96, 64, HF, 1, 1, 1), marks=slow),
        pytest.param(Case(EDGES, (6, 3), 112, 128, BF, None, 1, 1), marks=slow),
        pytest.param(Case(EDGES, (5, 1), 256, 8, HF, 20, 1, 1), marks=slow),
        pytest.param(Case([500, 33], (8, 1), 256, 16, BF, None, 132, 8), marks=slow),
        pytest.param(Case([900], (4, 1), 64, 128, BF, None, 132, 8), marks=slow),
        pytest.param(Case([1000], (2, 1), 128, 8, HF, None, 132, 8), marks=slow),
        pytest.param(Case([700, 3], (2, 2), 128, 32, BF, 300, 8, 2), marks=slow),
    ],
)
def test_16_bits(emulator: Emulator, case: Case) -> None:
    assert case_error(emulator, of_16, case) < of_16.LIMIT[case.dtype]


@pytest.mark.parametrize(
    "case",
    [
        Case([1, 17, 33, 100], (4, 2), 64, 16, BF, None, 1, 1),
        pytest.param(Case([150, 7], (8, 1), 64, 16, HF, 140, 3, 2), marks=slow),
        pytest.param(Case([900], (4, 1), 128, 32, HF, None, 132, 8), marks=slow),
    ],
)
def test_sinks(emulator: Emulator, case: Case) -> None:
    assert case_error(emulator, of_16, case, sinks=True) < of_16.LIMIT[case.dtype]


@pytest.mark.parametrize(
    "case",
    [
        Case([1, 17, 0, 33, 100], 1, 64, 8, BF, None, 1, 1),
        Case([300, 7], 1, 128, 16, HF, None, 2, 2),
        Case([140], 2, 64, 128, BF, 70, 1, 1),
        pytest.param(Case(EDGES, 2, 128, 32, HF, 33, 1, 1), marks=slow),
        pytest.param(Case(EDGES, 2, 128, 64, BF, None, 1, 1), marks=slow),
        pytest.param(Case(EDGES, 1, 64, 16, HF, 1, 1, 1), marks=slow),
        pytest.param(Case([1000], 1, 64, 8, BF, None, 132, 8), marks=slow),
        pytest.param(Case([500, 33], 2, 128, 16, HF, 400, 132, 4), marks=slow),
    ],
)
def test_8_bits(emulator: Emulator, case: Case) -> None:
    assert case_error(emulator, of_8, case) < of_8.LIMIT[case.dtype]


@pytest.mark.parametrize("bits", [pytest.param(8, marks=slow), 16])
def test_sequences_of_more_rows_are_left_alone(emulator: Emulator, bits: int) -> None:
    lengths = [(1, 40), (3, 50), (1, 9)]
    if bits == 8:
        args = of_8._arguments(lengths, 1, 64, 8, device="cpu")
    else:
        args = of_16._arguments(lengths, (2, 1), 64, 8, device="cpu")
    emulator.num_sms = 1
    assert error(emulator, args, 1) < of_16.LIMIT[BF]


SEEN_16 = (
    "key >= first && key < length ? score[t][i]",
    "key >= first && key <= length ? score[t][i]",
)
SEEN_8 = (
    "const bool visible = key >= first && key < length;",
    "const bool visible = key < length;",
)
MEET = ("    if (SPLITS > 1) cluster_wait();", "")
LANDED = ("    mbarrier_wait(shared_address(&parts.landed), 0);\n", "")
JOIN = ("four / parts.EACH);", "rank);")
FRONT = ("    pdl_wait();\n", "")
SINK = ("exp2_fast(sink - most + exponent)", "exp2_fast(sink - most)")
MASS = ("merged.row_sum += stats(i).row_sum * weight[i];", "merged.row_sum += stats(i).row_sum;")


@pytest.mark.parametrize(
    ("bits", "change"),
    [
        pytest.param(16, SEEN_16, id="16-the key behind the last"),
        pytest.param(8, SEEN_8, id="8-keys in front of the window", marks=slow),
        *(
            pytest.param(bits, change, id=f"{bits}-{name}", marks=slow)
            for bits in (8, 16)
            for name, change in (
                ("the kernel in front not waited for", FRONT),
                ("blocks do not meet", MEET),
                ("the other blocks not waited for", LANDED),
                ("a block keeps its results", JOIN),
                ("warps' masses as they are", MASS),
            )
        ),
    ],
)
def test_the_emulation_sees_mistakes(
    emulator: Emulator, bits: int, change: tuple[str, str]
) -> None:
    emulator.num_sms = 2

    def is_right() -> bool:
        if bits == 8:
            args = of_8._arguments([(1, 300)], 1, 64, 16, HF, 260, device="cpu")
            return error(emulator, args, 2) < of_8.LIMIT[HF]
        args = of_16._arguments([(1, 150)], (2, 1), 128, 16, HF, 140, device="cpu")
        return error(emulator, args, 2) < of_16.LIMIT[HF]

    assert emulator.detects(change, is_right)


@slow
def test_the_emulation_sees_a_sink_of_another_weight(emulator: Emulator) -> None:
    case = Case([40], (2, 1), 64, 16, HF, None, 1, 1)
    assert emulator.detects(
        SINK, lambda: case_error(emulator, of_16, case, sinks=True) < of_16.LIMIT[HF]
    )

"""one_row.cu on a CPU: its threads as fibers, its copies late and in any order, against float64.

What no emulation sees is the hardware's timing and memory model; that is for the GPU tests of the ops.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.forms import calibrated
from modelmill.ops.clustered_linear import clustered_linear
from modelmill.ops.cuda import one_row
from modelmill.ops.cuda.build import FOLDER
from modelmill.ops.int4_linear import drawn, unpacked
from modelmill.weights import clustered

GXX = shutil.which("g++")
KNOWS_HALVES = GXX is not None and int(subprocess.check_output([GXX, "-dumpversion"], text=True).split(".")[0]) >= 12
slow = pytest.mark.slow
HERE = Path(__file__).parent / "emulation"
HEADERS = ("hopper", "numbers", "narrow_types", "planes")
pytestmark = pytest.mark.skipif(not KNOWS_HALVES, reason="g++ 12 or newer is not here")
BF, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Macros → the kernel as a library; another change of the source may be given."""
    folder = tmp_path_factory.mktemp("emulation")
    for header in HEADERS:
        (folder / f"{header}.cuh").write_text('#pragma once\n#include "emulated.h"\n')
    shutil.copy(HERE / "emulated.h", folder)

    def build(macros: tuple[str, ...], change: tuple[str, str] | None = None) -> ctypes.CDLL:
        text = (FOLDER / "one_row.cu").read_text()
        if change is not None:
            assert change[0] in text, "the source has changed"
            text = text.replace(*change)
        name = hashlib.sha1(repr((macros, change)).encode(), usedforsecurity=False).hexdigest()[:16]
        source, library = folder / f"{name}.cpp", folder / f"{name}.so"
        if not library.exists():
            source.write_text(text)
            flags = ["-O1", "-std=c++17", "-w", "-Wno-psabi", "-fPIC", "-shared", f"-I{folder}"]
            told = [f'-DSOURCE="{source}"', "-DKERNEL=one_row", *(f"-D{macro}" for macro in macros)]
            subprocess.run([str(GXX), *flags, *told, "-o", str(library), str(HERE / "host.cpp")], check=True)
        return ctypes.CDLL(str(library))

    return build


def run(
    built: Any,
    x: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int],
    more: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    *,
    dtype: torch.dtype = F32,
    gated: bool = False,
    change: tuple[str, str] | None = None,
    blocks: int = 2,
) -> torch.Tensor:
    """As one_row.product."""
    weight, scale, offset, group = grids
    rows, columns = weight.shape[0], x.shape[1]
    kind, groups = one_row.kind_of(x, weight, scale, offset, group), scale.numel() // rows
    assert one_row.serves(x, weight, kind, group, groups)
    plan = one_row.planned(kind, (rows, columns), group, groups, dtype, gated=gated)
    out = torch.full((1, rows // 2 if gated else rows), float("nan"), dtype=dtype)
    pointers = [0 if t is None else t.data_ptr() for t in (x, scale, offset, *more, out)]
    work = struct.pack("=7Q6i", *pointers, *plan.sizes)
    sizes, strides, box = ((*t, 1, 0)[:3] for t in plan.weight(weight.stride(0)))
    there = struct.pack("=16Q", weight.data_ptr(), *sizes, *strides[:2], *box[1:], *[0] * 8)
    library = built(plan.macros, change)
    if library.emulate(there, work, min(blocks, plan.tiles), plan.threads, 1):
        raise RuntimeError("threads wait for one another, or copies are left at the end")
    return out


def held4(
    n: int, k: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Of 4 bits."""
    held = drawn(n, k, group, device="cpu", symmetric=symmetric)
    assert held["weight"] is not None and held["scale"] is not None  # noqa: PT018
    return held["weight"], held["scale"], held["offset"], group


def wild(k: int) -> torch.Tensor:
    """With outliers, and values of all sizes."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(1, k, generator=generator) * torch.exp(2 * torch.randn(1, k, generator=generator))
    x[:, ::37] *= 30
    return x.to(BF)


@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        pytest.param(96, 4096, 128, marks=slow),
        (160, 576, 128),
        pytest.param(32, 11008, 128, marks=slow),
        (64, 1056, 32),
        pytest.param(64, 1120, 64, marks=slow),
        (32, 1024, 256),
    ],
)
def test_four_bits(built: Any, n: int, k: int, group: int) -> None:
    x, grids = wild(k), held4(n, k, group, symmetric=n == 96)
    right = x.double() @ unpacked(*grids, k, torch.float64).T
    assert (run(built, x, grids).double() - right).norm() < 1e-6 * right.norm()


@slow
@pytest.mark.parametrize("bits", [4, 8])
def test_gated(built: Any, bits: int) -> None:
    weight, scale, offset, group = held4(96, 4096, 128, symmetric=False)
    full = unpacked(weight, scale, offset, group, 4096, torch.float64)
    if bits == 8:
        weight, scale, offset, group = (
            torch.randint(-128, 128, (96, 4096)).to(torch.int8),
            torch.rand(96) / 4096,
            None,
            4096,
        )
        full = weight.double() * scale.double()[:, None]
    gate, up = (torch.ones(1, 4096).to(BF).double() @ full.T).to(BF).double().chunk(2, 1)
    right = torch.nn.functional.silu(gate) * up
    out = run(built, torch.ones(1, 4096, dtype=BF), (weight, scale, offset, group), dtype=BF, gated=True)
    assert (out.double() - right).norm() < 8e-3 * right.norm()


@pytest.mark.parametrize(("n", "k"), [pytest.param(80, 4096, marks=slow), (32, 672)])
def test_eight_bits(built: Any, n: int, k: int) -> None:
    weight = torch.randint(-128, 128, (n, k)).to(torch.int8)
    scale = torch.rand(n) + 0.5
    right = wild(k).double() @ (weight.double() * scale.double()[:, None]).T
    assert (run(built, wild(k), (weight, scale, None, k)).double() - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [pytest.param(4096, marks=slow), 4224])
def test_clustered_integers(built: Any, bits: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    held = calibrated(clustered.Held.pack(torch.randn(48, k, generator=generator) * k**-0.5, BF, weight_bits=bits))
    columns = held.order.numel()
    x = torch.randint(-128, 128, (1, columns), generator=generator).to(torch.int8)
    grids, more = (held.weight, held.scale, held.offset, held.group), (held.step, held.constant, None)
    right = clustered_linear(x, *grids, *more, F32).double()
    assert (run(built, x, grids, more).double() - right).norm() < 1e-6 * right.norm()


@slow
@pytest.mark.parametrize(
    "change",
    [
        ("            wait(full_of(warp, stage), parity);\n", ""),
        ("        wait(scales_full(slot), scale_parity);\n", ""),
        ("row_of(int quad) { return quad / 2 + quad % 2 * 4; }", "row_of(int quad) { return quad; }"),
        ("if (++stage == STAGES) stage = 0, parity ^= 1;", "if (++stage == STAGES) stage = 0;"),
        ("16 * whole[i] - upper", "16 * whole[i]"),
    ],
    ids=["lines not waited for", "scales not waited for", "rows elsewhere", "parity forgotten", "upper halves kept"],
)
def test_the_emulation_sees_mistakes(built: Any, change: tuple[str, str]) -> None:
    """All but where a thread's rows are: any order of them is right, and only how banks are read hangs on it."""
    x, grids = wild(4096), held4(192, 4096, 128, symmetric=False)
    right = x.double() @ unpacked(*grids, 4096, torch.float64).T
    try:
        off = float((run(built, x, grids, change=change).double() - right).norm() / right.norm())
    except RuntimeError:
        off = float("inf")
    assert (off < 1e-6) == ("row_of" in change[0])

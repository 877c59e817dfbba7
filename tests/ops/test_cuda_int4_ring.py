"""Products with 4-bit weights whose pieces come through shared memory: sizes that fit, every form, hard inputs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import shelf
from modelmill.ops.cuda import build, int4_ring, int4_rows
from modelmill.ops.int4_linear import int4_linear, pack_codes
from tests.ops.nvcc import compiles_without_spills, needed

LIMIT = {torch.bfloat16: 3e-3, torch.float16: 5e-4}  # of the whole, in the norm


@given(st.integers(1, 4000), st.integers(1, 800), st.sampled_from([128, 256, 512, 1 << 20]), st.sampled_from([32, 64]))
def test_a_form_fits_wherever_one_is_chosen(eights: int, runs: int, group: int, box: int) -> None:
    rows, columns = 8 * eights, 32 * runs
    assert int4_ring.serves(rows, columns, group, gated=False)
    form = int4_ring.form_of(rows, columns, group, box, 132)
    assert form is not None
    pieces, by = -(-columns // 128), int4_ring.shift(group, columns)
    assert by is not None
    share = int4_rows.share_of(pieces, form.split, by)
    assert int4_ring.shared(form, box, share) <= 227 << 10
    assert 3 <= int4_ring.stages_of(form, box, share) <= 8


def test_what_it_does_not_serve() -> None:
    assert not int4_ring.serves(4096, 4096, 64, gated=False)
    assert not int4_ring.serves(4096, 4096, 384, gated=False)
    assert not int4_ring.serves(4100, 4096, 128, gated=False)
    assert not int4_ring.serves(4104, 4096, 128, gated=True)


@needed
@pytest.mark.parametrize("form", [int4_ring.Form(2, 4), int4_ring.Form(3, 1), int4_ring.Form(3, 4)], ids=str)
@pytest.mark.parametrize("box", [32, 64])
def test_compiles_without_spills(form: int4_ring.Form, box: int, tmp_path: Path) -> None:
    for dtype, gated in ((torch.bfloat16, True), (torch.float16, False)):
        macros = int4_ring._macros(dtype, form, box, 22, offset=gated, gated=gated)
        compiles_without_spills("int4_ring.cu", macros, tmp_path / "out")


def _drawn(rows: int, columns: int, group: int, *, offset: bool, seed: int) -> dict[str, torch.Tensor | int | None]:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(rows, groups, generator=generator) * 0.03 + 0.002).half().cuda()
    shift = (-scale.float() * (torch.rand(rows, groups, generator=generator) * 15).cuda()).half()
    return {"weight": pack_codes(codes).cuda(), "scale": scale, "offset": shift if offset else None, "group": group}


def _check(x: torch.Tensor, args: dict, form: int4_ring.Form, bias: torch.Tensor | None, *, gated: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        got = int4_ring.product(x, *args.values(), bias, form, gated=gated)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
    truth = int4_linear(x.double(), **wide, bias=None if bias is None else bias.double())
    if gated:
        gate, up = truth.to(x.dtype).double().chunk(2, 1)
        truth = gate / (1 + torch.exp(-gate)) * up
    assert not got.isnan().any()
    assert float((got.double() - truth).norm() / truth.norm()) < LIMIT[x.dtype]
    again = int4_ring.product(x, *args.values(), bias, form, gated=gated)
    assert torch.equal(again, got), "the bits change from call to call"


@pytest.mark.gpu
@pytest.mark.parametrize("form", int4_ring.FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_form(form: int4_ring.Form, dtype: torch.dtype) -> None:
    if build.available("cuda") is not None:
        pytest.skip(str(build.available("cuda")))
    shapes = [(9, 136, 2048, 128), (64, 400, 2080, 128), (33, 4096, 4096, 256), (64, 1024, 11008, 128)]
    for (tokens, rows, columns, group), gated in itertools.product([*shapes, (40, 16, 4128, 1 << 20)], (False, True)):
        if not int4_ring.fits(form, columns, group, int4_rows.box_of(tokens)):
            continue
        args = _drawn(rows, columns, group, offset=not gated or tokens == 64, seed=tokens)
        bias = torch.randn(rows, device="cuda", dtype=dtype) if tokens == 33 else None
        x = torch.randn(tokens, columns + 64, device="cuda", dtype=dtype)[:, :columns]
        _check(x, args, form, bias, gated=gated)
        x = x.abs() if not gated else x
        x[:, 7] *= 30
        _check(x, args, form, bias, gated=gated)


@pytest.mark.gpu
def test_the_shelf_leaves_small_groups_and_odd_rows_to_others() -> None:
    run = shelf.resolve("cuda").int4_linear
    for rows, columns, group in ((100, 2048, 128), (4096, 2048, 64), (4096, 1024, 32), (4096, 4096, 128)):
        args = _drawn(rows, columns, group, offset=True, seed=rows)
        x = torch.randn(40, columns, device="cuda", dtype=torch.bfloat16)
        wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()}
        truth = int4_linear(x.double(), **wide)
        assert float((run(x, **args).double() - truth).norm() / truth.norm()) < LIMIT[x.dtype]

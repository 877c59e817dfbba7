"""The page of kernels is what the heads of the files and the measured rows give."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.cuda.common import launch
from tools import kernels_page
from tools.generated_page import stale_pages
from tools.kernel_heads import KernelHead, read_heads
from tools.performance.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
H200_ROWS = read_rows(ROOT / kernels_page.RESULTS / "h200.jsonl")
HEADS = {head.path.name: head for head in read_heads(ROOT)}


def test_the_page_of_the_repository_is_fresh() -> None:
    assert not stale_pages(ROOT, kernels_page.render_pages(ROOT), kernels_page.FAMILY_PAGES), (
        "run `make kernels` and commit what it writes"
    )


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("M = 1; N even", (1, 1)),
        ("M ≤ 64 where it is faster", (1, 64)),
        ("M ≥ 512 whose tiles fill the SMs", (512, None)),
        ("9 ≤ M ≤ 64 (2 ≤ M ≤ 64 for int8)", (9, 64)),
        ("any M (at most M = 3)", (1, None)),
    ],
)
def test_rows_of_a_range(text: str, interval: tuple[int, int | None]) -> None:
    assert kernels_page.row_interval(text) == interval


@pytest.mark.parametrize(
    ("text", "case", "served"),
    [
        ("M = 1", "1x4096->4096 g128", True),
        ("M = 1", "8x4096->4096 g128", False),
        ("M ≥ 17", "8x64->48", False),
        ("M ≥ 17", "64x64->48", True),
        ("any M", "vit-h-global", True),
        ("M ≤ 64", "vit-h-global", False),
        ("2 ≤ M ≤ 8 and N · K < 2^25", "8x4096->4096", True),
        ("2 ≤ M ≤ 8 and N · K < 2^25", "8x4096->2x11008", False),
        ("decode, int8 pages; DIM 64", "decode-8-4096-int8", True),
        ("decode, int8 pages; DIM 64", "decode-8-4096", False),
        ("decode, 16-bit pages; DIM 64", "decode-8-4096-fp8", False),
        ("decode, 16-bit pages; DIM 64", "decode-8-4096", True),
        ("prefill; DIM 64", "decode-8-4096", False),
        ("any M with 16-bit activations", "1x64->48-16x8", True),
        ("8-bit activations, M ≤ 255", "1x64->48-16x8", False),
        ("8-bit activations, M ≤ 255", "1x64->48", True),
    ],
)
def test_a_range_covers_a_case(text: str, case: str, served: bool) -> None:
    assert kernels_page.serves_case(text, case) == served


def row(case: str, fraction: float, **more: object) -> Row:
    return {
        "op": "linear", "variant": "cuda", "dtype": "bfloat16", "case": case, "value": 10.0,
        "gbps": 4000.0, "fraction": fraction, "bound": "memory", "device": "NVIDIA H200",
        "date": "2026-11-23T05:00:00Z", **more,
    }  # fmt: skip


def head(text: str, name: str = "x.cu") -> KernelHead:
    path = Path("modelmill/ops/cuda/gemm_16bit") / name
    return KernelHead(path, "Title.", {"Range": text, "Ops": "linear"})


def test_the_newest_row_of_the_largest_case_in_range() -> None:
    rows = [
        row("8x64->48", 0.1, gbps=40.0),
        row("8x4096->4096", 0.2),
        row("8x4096->4096", 0.3),
        row("512x4096->4096", 0.9, gbps=9000.0),
        row("8x9999->4096", 0.8, variant="triton", gbps=9000.0),
    ]
    largest = kernels_page.largest_row(rows, "linear", head("M ≤ 64"), ())
    assert largest is not None
    assert largest["fraction"] == 0.3
    assert kernels_page.largest_row(rows, "linear", head("M ≤ 64"), ("M ≤ 8",)) is None
    assert kernels_page.largest_row(rows, "linear", head("M ≥ 1024"), ()) is None
    assert kernels_page.share_cell(largest) == "**0.30** (8x4096->4096; H200, 2026-11-23)"
    assert kernels_page.share_cell(rows[0]).startswith("launch (8x64")
    assert kernels_page.share_cell(None) == "–"


def test_a_range_names_the_kernels_before_it() -> None:
    assert kernels_page.comes_after(head("M ≤ 64 where a.cu and b.cu do not apply; K even")) == (
        "a.cu",
        "b.cu",
    )
    assert kernels_page.comes_after(head("M ≤ 8 (other M where a.cu does not apply)")) == ()
    assert kernels_page.comes_after(head("M ≤ 64 where it is faster")) == ()


def test_stale_after_another_head_or_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "modelmill/ops/cuda/gemm_16bit"
    results = tmp_path / "benchmarks/results"
    for made in (folder, results, tmp_path / "docs", tmp_path / "tests/ops"):
        made.mkdir(parents=True)
    (folder / "linear.py").write_text('"""Launches x.cu."""\n')
    (tmp_path / "tests/ops/test_x.py").write_text('SOURCE = "x.cu"\n')
    source = folder / "x.cu"
    fields = (
        "Computes: y\nDtypes: bfloat16\nLayout: rows\nRange: M ≤ 64\nTechnique: TMA\nOps: linear"
    )
    lines = ("Title.", "", *fields.split("\n"))
    source.write_text("".join(f"// {line}".rstrip() + "\n" for line in lines))
    arguments = ["--root", str(tmp_path)]
    assert kernels_page.main([*arguments, "--check"]) == 1
    assert "make kernels" in capsys.readouterr().err
    assert kernels_page.main(arguments) == 0
    assert "(kernels/gemm_16bit.md) | `linear` |" in (tmp_path / kernels_page.PAGE).read_text()
    family = tmp_path / kernels_page.FAMILY_PAGES / "gemm_16bit.md"
    text = family.read_text()
    assert (
        "| `linear` | cuda | [x.cu](../../modelmill/ops/cuda/gemm_16bit/x.cu) | bfloat16 |" in text
    )
    assert "| M ≤ 64 | TMA | – | [x](../../tests/ops/test_x.py) |" in text
    assert kernels_page.main([*arguments, "--check"]) == 0
    (results / "h200.jsonl").write_text(json.dumps(row("8x4096->4096", 0.3)) + "\n")
    assert kernels_page.main([*arguments, "--check"]) == 1
    assert kernels_page.main(arguments) == 0
    assert "**0.30**" in family.read_text()
    source.write_text(source.read_text().replace("TMA", "wgmma"))
    assert kernels_page.main([*arguments, "--check"]) == 1


def largest_cuda_row(op: str, shown: KernelHead) -> Row | None:
    """The row on the page of an op and a kernel."""
    before = [HEADS[name].range_of(op) for name in kernels_page.comes_after(shown)]
    return kernels_page.largest_row(H200_ROWS, op, shown, before)


SHOWN = [
    (op, shown, largest["case"])
    for shown in HEADS.values()
    if shown.backend == "cuda" and shown.path.suffix == ".cu"
    for op in shown.ops
    if op.startswith("int") and not op.endswith("_moe")
    if (largest := largest_cuda_row(op, shown)) is not None
]


@pytest.mark.parametrize(
    ("op", "shown", "case"), SHOWN, ids=lambda each: getattr(each, "title", each)
)
def test_the_case_shown_launches_the_kernel(
    op: str, shown: KernelHead, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weight-only GEMMs, several of which serve an op; experts launch all."""
    launched: list[str] = []

    class Kernel:
        def launch(self, *arguments: object, pdl: bool) -> None: ...

    def compile_and_load_kernel(source: str, *arguments: object) -> Kernel:
        launched.append(source)
        return Kernel()

    monkeypatch.setattr(launch, "compile_and_load_kernel", compile_and_load_kernel)
    monkeypatch.setattr(launch, "tensor_map", lambda *arguments: b"")
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    sizes = re.match(r"(\d+)x(\d+)->(2x)?(\d+)(?: g(\d+))?", case)
    assert sizes is not None
    m, k, n = int(sizes[1]), int(sizes[2]), int(sizes[4]) * (2 if sizes[3] else 1)
    group = int(sizes[5] or k)
    args = {"x": torch.empty(m, k, dtype=torch.bfloat16), "bias": None}
    if sizes[5]:
        grid = torch.empty(n, k // group, dtype=torch.float16)
        args |= {"scale": grid, "offset": grid if op.startswith("int4") else None, "group": group}
    else:
        args["scale"] = torch.empty(n)
    int4 = op.startswith("int4")
    args["weight"] = torch.empty(
        n, k // 2 if int4 else k, dtype=torch.uint8 if int4 else torch.int8
    )
    kernels = registry.implementations(op)["cuda"]
    registry.adapt_to_named_args(op, kernels.run)(**args)
    assert set(launched) == {shown.path.stem}, launched

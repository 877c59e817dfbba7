"""Compiling the CUDA C++ kernels: what the key covers, one compilation for all, every failure one
line.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from modelmill.core.errors import MissingDependency
from modelmill.ops.cuda.attention import paged_attention
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.w8a8_gemm import rptq_linear
from modelmill.ops.cuda.weight_only_gemm import (
    int4_linear,
    int8_gemm_small_m,
    weight_only,
    wq_gemv,
)
from tests.ops.nvcc import NVCC, compiles_without_spills, requires_nvcc

MACRO_SETS = (
    ("DIM=128", "PAGE=16"),
    ("DIM=128", "PAGE=16", "HALF"),
    ("DIM=64", "PAGE=16"),
    ("DIM=128", "PAGE=128"),
    ("DIM=64", "PAGE=8"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of our own, and an empty cache beside it."""
    made = tmp_path / "sources"
    made.mkdir()
    (made / "kernel.cu").write_text("kernel")
    (made / "common.cuh").write_text("common")
    monkeypatch.setattr(build, "KERNEL_SOURCES_FOLDER", made)
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    return made


def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make a shell script the only compiler; in it $out is the file to write."""
    path = tmp_path / "nvcc"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; out=$2\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: build.Compiler("one", path=str(path)))


def test_the_key_covers_all_that_decides_the_code(folder: Path) -> None:
    keys = [build._cubin_key("kernel", ("A",), "one")]
    assert keys[0] == build._cubin_key("kernel", ("A",), "one")
    keys += [
        build._cubin_key("kernel", macros, version)
        for macros, version in ((("B",), "one"), (("A",), "two"))
    ]
    (folder / "common.cuh").write_text("changed")
    keys.append(build._cubin_key("kernel", ("A",), "one"))
    (folder / "kernel.cu").write_text("changed")
    keys.append(build._cubin_key("kernel", ("A",), "one"))
    assert len(set(keys)) == 5


@pytest.mark.usefixtures("folder")
def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, f'echo x >> {tmp_path}/calls; echo cubin > "$out"')
    first = build.compile_cubin("kernel", ("A",))
    assert build.compile_cubin("kernel", ("A",)) == first
    assert build.compile_cubin("kernel", ("B",)) != first
    assert first.read_text() == "cubin\n"
    assert (tmp_path / "calls").read_text().split() == ["x", "x"]
    assert sorted(p.suffix for p in first.parent.iterdir()) == [".cubin", ".cubin"], (
        "nothing is left behind"
    )


@pytest.mark.usefixtures("folder")
def test_a_failing_compiler_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiler(
        tmp_path,
        monkeypatch,
        "echo note >&2; echo 'kernel.cu(3): error: no such thing' >&2; exit 2",
    )
    with pytest.raises(MissingDependency, match="no such thing") as error:
        build.compile_cubin("kernel")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("folder")
def test_a_variant_says_why_its_kernel_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "GPU" in str(build.kernel_compile_failure_reason("cpu", "kernel", ()))
    monkeypatch.setattr(build, "unavailable_reason", lambda _: None)
    _compiler(tmp_path, monkeypatch, "echo 'kernel.cu(3): error: no such thing' >&2; exit 2")
    assert "no such thing" in str(build.kernel_compile_failure_reason("cuda", "kernel", ()))
    _compiler(tmp_path, monkeypatch, 'echo cubin > "$out"')
    assert build.kernel_compile_failure_reason("cuda", "kernel", ()) is None


def test_kernels_are_given_as_many_bytes_as_they_read() -> None:
    """Each kernel's ``static_assert`` of its parameter's size names the module whose
    ``struct.pack`` makes it.
    """
    asserted = re.compile(r'sizeof\(\w+\) == (\d+), "([\w., ]+) packs? (\d+) bytes"')
    arguments = []
    for source in build.KERNEL_SOURCES_FOLDER.rglob("*.cu*"):
        for size, names, same in asserted.findall(source.read_text()):
            assert size == same, source
            arguments += [(int(size), source.with_name(name)) for name in names.split(", ")]
    assert len(arguments) == 22
    for size, module in arguments:
        formats = re.findall(r'struct\.pack\(\s*"(=\w+)"', module.read_text())
        assert size in map(struct.calcsize, formats), module


@pytest.mark.usefixtures("folder")
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiler(tmp_path, monkeypatch, 'echo cubin > "$out"')
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(MissingDependency, match="cannot be written"):
        build.compile_cubin("kernel")


@pytest.mark.usefixtures("folder")
def test_without_a_compiler_the_message_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_nvrtc", lambda: None)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "find_compiler", build.find_compiler.__wrapped__)
    with pytest.raises(MissingDependency, match="NVRTC"):
        build.compile_cubin("kernel")


def test_nvcc_serves_where_nvrtc_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvrtc", lambda: None)
    second = build.Compiler("second", path="/nowhere/nvcc")
    monkeypatch.setattr(build, "find_nvcc", lambda: second)
    assert build.find_compiler.__wrapped__() is second


def test_a_cpu_gets_the_reason() -> None:
    assert "GPU" in str(build.unavailable_reason("cpu"))
    assert "GPU" in str(paged_attention.unavailable_reason("cpu"))


@requires_nvcc
@pytest.mark.parametrize("macros", MACRO_SETS, ids=" ".join)
def test_prefill_attention_compiles_without_spills(macros: tuple[str, ...], tmp_path: Path) -> None:
    compiles_without_spills("paged_attention.cu", macros, tmp_path / "out")


@requires_nvcc
@pytest.mark.parametrize("tokens", [most for most, _ in weight_only.KERNEL_CONFIGS])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("piece", [128, 64, 32])
def test_int4_compiles_without_spills(tokens: int, gated: bool, piece: int, tmp_path: Path) -> None:
    config, dtype = weight_only.config_for(tokens), torch.float16 if piece == 64 else torch.bfloat16
    macros = int4_linear._kernel_macros(dtype, config, piece, offset=piece != 64, gated=gated)
    # 64 rows of weights that wq_gemm_pipelined does not serve: the rows are no multiple of 8
    most = 36 if tokens == weight_only.MAX_ROWS and piece == 128 else 0
    compiles_without_spills("int4_linear.cu", macros, tmp_path / "out", most)


@requires_nvcc
@pytest.mark.parametrize("tokens", [most for most, _ in weight_only.KERNEL_CONFIGS])
@pytest.mark.parametrize(
    ("piece", "gated"), [("most", False), (64, True), (32, False), ("most", True)]
)
def test_int8_compiles_without_spills(
    tokens: int, piece: int | str, gated: bool, tmp_path: Path
) -> None:
    config = weight_only.config_for(tokens)
    k_tile = (
        piece if isinstance(piece, int) else int8_gemm_small_m.k_tile_for_rows(tokens, 4096, 4096)
    )
    dtype, wide = (torch.float16, False) if k_tile == 64 else (torch.bfloat16, gated)
    macros = int8_gemm_small_m.kernel_macros(
        dtype, config, k_tile, offset=not gated, float32_scales=wide, gated=gated
    )
    compiles_without_spills("int8_gemm_small_m.cu", macros, tmp_path / "out")


ONE_ROW = [(4, False, True, False, 1), (4, False, True, False, 2), (4, False, False, False, 4)]
ONE_ROW += [(8, False, False, True, 1), (8, True, False, False, 1), (4, True, True, False, 1)]
ONE_ROW += [(8, False, True, False, 1), (8, False, False, False, 2), (8, False, True, False, 4)]


@requires_nvcc
@pytest.mark.parametrize("spec", [wq_gemv.WqGemvSpec(*each) for each in ONE_ROW])
def test_products_of_one_row_compile_without_spills(
    spec: wq_gemv.WqGemvSpec, tmp_path: Path
) -> None:
    groups = 1 if spec.float32_scales else 4096 // 128 * spec.groups_per_tile
    for dtype, gated in (
        (torch.bfloat16, not spec.int8_input),
        (torch.float32 if spec.int8_input else torch.float16, False),
    ):
        plan = wq_gemv.plan_launch(spec, (4096, 4096), 4096 // groups, groups, dtype, gated=gated)
        compiles_without_spills("wq_gemv.cu", plan.macros, tmp_path / "out")


@pytest.mark.parametrize("spec", [wq_gemv.WqGemvSpec(*each) for each in ONE_ROW])
@pytest.mark.parametrize("columns", [32, 576, 4096, 11008, 14336, 28672])
def test_blocks_of_one_row_have_room_and_are_alone(spec: wq_gemv.WqGemvSpec, columns: int) -> None:
    """More than half of a multiprocessor's 228 KB, no more than a block may have, up to the widths
    of 70B models.
    """
    groups = 1 if spec.float32_scales else -(-columns // 128) * spec.groups_per_tile
    shape = wq_gemv.config_for(spec, columns, groups)
    if columns * spec.groups_per_tile > 1 << 16 and spec == wq_gemv.WqGemvSpec(
        8, False, True, False, 4
    ):
        assert shape is None, "scales and offsets of 896 groups: int8_gemm_small_m serves those"
        return
    assert shape is not None
    assert 114 << 10 < wq_gemv.shared_bytes(spec, shape) <= 227 << 10


@requires_nvcc
@pytest.mark.parametrize("weight_dtype", rptq_linear.KERNEL_CONFIGS, ids=str)
@pytest.mark.parametrize("tokens", [most for most, _ in rptq_linear.KERNEL_CONFIGS[torch.int8]])
def test_clustered_compiles_without_spills(
    weight_dtype: torch.dtype, tokens: int, tmp_path: Path
) -> None:
    config, packed = rptq_linear.config_for(tokens, weight_dtype), weight_dtype is torch.uint8
    for dtype, dynamic in ((torch.bfloat16, False), (torch.float32, True)):
        macros = rptq_linear._kernel_macros(
            dtype, config, packed=packed, offset=packed, float32_scales=dynamic, dynamic=dynamic
        )
        compiles_without_spills("rptq_linear.cu", macros, tmp_path / "out")


def test_structures_of_the_driver_have_their_sizes() -> None:
    """As cuda.h 13.0 lays them out: CUlaunchConfig 56 bytes, CUlaunchAttribute 72."""
    assert struct.calcsize(launch._LAUNCH_CONFIG_STRUCT) == 56
    assert struct.calcsize(launch._LAUNCH_ATTRIBUTE_STRUCT) == 72


@requires_nvcc
def test_a_size_that_cannot_be_is_refused_by_the_source() -> None:
    assert NVCC is not None
    with pytest.raises(build._KernelBuildFailed, match="error"):
        build._compile(NVCC, "paged_attention", ("DIM=128", "PAGE=4"))

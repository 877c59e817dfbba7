"""Heads of kernel files: every field is there, and what can be checked of them is true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from modelmill.ops import registry
from modelmill.ops.kernel_support import UNBOUNDED
from tools.kernel_heads import (
    BACKENDS,
    FIELDS,
    NATIVE_SUFFIXES,
    OPS,
    KernelHead,
    kernel_files,
    read_head,
    read_heads,
)
from tools.kernels_page import row_interval

ROOT = Path(__file__).resolve().parents[2]
HEADS = read_heads(ROOT)
KERNELS = [head for head in HEADS if head.ops]
SHARED = [head for head in HEADS if head.users]
INCLUDE = re.compile(r'#include "([^"]+)"')
# a technique's name, and what its source then has (headers of `common` left out)
TECHNIQUES = {
    "cuda": {
        "TMA": r"\b(tma_load|TensorMap)\b",
        "multicast": r"tma_load_multicast",
        "bulk async copy": r"\bbulk_load\(",
        "mbarrier pipeline": r"\b(PipelineBarriers|mbarrier_wait)\b",
        "wgmma": r"\bwgmma(_\w+)?\b",
        "mma.sync": r"\bmma(_\w+)?\(",
        "named barriers": r"named_barrier_sync",
        "setmaxnreg": r"setmaxnreg_(inc|dec)",
        "DSMEM": r"\bdsmem_(load(_float4)?|store_async)\(",
        "split-K": r"\bSPLIT\b",
        "split-KV": r"\bSPLITS\b",
        "cluster": r"\b(cluster_rank|cluster_sync\w*|dsmem_\w+)\b",
        "PDL": r"\bpdl_wait\(",
    },
    "triton": {
        "PDL": r"\bpdl_wait_and_trigger\(",
        "tensor cores": r"\btl\.dot\(",
        "cached launcher": r"\bCachedLauncher\b",
        "cuBLAS": r"\bF\.linear|addmm|_addmm",
    },
    "cpu": {
        "VNNI": r"_dpbusd_|dpbusd",
        "BF16": r"AVX512_?BF16|dpbf16",
        "permutexvar": r"permutexvar",
        "software prefetch": r"[Pp]refetch",
        "thread pool": r"\bparallel_for\b",
        "futex": r"futex",
    },
}


def _name(head: KernelHead) -> str:
    return head.path.relative_to(OPS).as_posix()


def _with_includes(path: Path, common: bool = True) -> str:
    """A native source and the headers of its backend that it includes, or a Python module."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        return text
    backend = OPS / path.relative_to(OPS).parts[0]
    for name in INCLUDE.findall(text):
        if common or not name.startswith("common/"):
            text += _with_includes(backend / name, common)
    return text


@cache
def _modules_of_backend(backend: str) -> dict[str, Path]:
    root = ROOT / OPS / backend
    return {path.stem: path for path in root.rglob("*.py") if path.name != "__init__.py"}


def _reached(backend: str, op: str) -> list[Path]:
    """The modules of a backend that an op's implementation imports, itself first."""
    files = _modules_of_backend(backend)
    reached, left = [], [op]
    while left:
        path = files.get(left.pop())
        if path is None or path in reached:
            continue
        reached.append(path)
        left += _imported_from_backend(path, backend)
    return reached


@cache
def _imported_from_backend(path: Path, backend: str) -> list[str]:
    """Names that a module imports from its backend, and the modules that have them."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"modelmill.ops.{backend}" in str(node.module):
            names += [each.name for each in node.names] + [str(node.module).split(".")[-1]]
    return names


@pytest.mark.parametrize("head", HEADS, ids=_name)
def test_every_field_is_there(head: KernelHead) -> None:
    needed = {"Computes", "Range", "Technique"} if head.family == "common" else set(FIELDS)
    assert needed <= head.fields.keys()
    assert all(head.fields.values())
    assert ("Ops" in head.fields) != ("Used by" in head.fields)
    assert head.title.endswith(".")


def test_native_sources_and_triton_kernels_have_heads() -> None:
    files = set(kernel_files(ROOT))
    native = {path for path in (ROOT / OPS).rglob("*.*") if path.suffix in NATIVE_SUFFIXES}
    triton = {
        path
        for path in (ROOT / OPS / "triton").rglob("*.py")
        if re.search(r"^@triton\.jit", path.read_text(), re.MULTILINE)
    }
    assert {path.relative_to(ROOT) for path in native | triton} <= files
    assert len(native) > 60


def _row_limits(module: ModuleType) -> list[tuple[int, int | None]]:
    """(least, most or None) rows of each range that an implementation states."""
    ranges = [*getattr(module, "SUPPORTED_PROBLEMS", ())]
    ranges += [kernel.range for kernel in getattr(module, "KERNELS", ())]
    limits = [(each.m[0], None if each.m[1] == UNBOUNDED else each.m[1]) for each in ranges]
    # of an implementation that takes launch configs: its ``run`` chooses among kernels
    if hasattr(module, "MAX_ROWS"):
        limits.append((1, module.MAX_ROWS))
    for name in ("DEQUANT_MIN_ROWS", "SCALED_MM_MIN_ROWS"):
        if hasattr(module, name):
            limits.append((getattr(module, name), None))
    # the kernels for few rows and for many that rms_norm_quant and add_rms_norm_quant share
    shared = getattr(module, "rmsnorm_quant_permute", None)
    if shared is not None:
        limits.append((shared.LARGE_M_MIN_ROWS, None))
    return limits or [(1, None)]


RANGES = [
    (op, head)
    for head in KERNELS
    for op in head.ops
    if registry.op_declarations()[op].problem is not None
]


@pytest.mark.parametrize(("op", "head"), RANGES, ids=lambda each: getattr(each, "path", each))
def test_rows_of_a_range_are_those_of_the_data(op: str, head: KernelHead) -> None:
    """The M of a head begins and ends where a range of the implementation does."""
    limits = _row_limits(registry.implementations(op)[head.backend])
    ends = {most for _, most in limits} | {least - 1 for least, _ in limits}
    least, most = row_interval(head.range_of(op))
    assert {least - 1, most} <= ends, (limits, head.range_of(op))


@pytest.mark.parametrize(
    ("op", "backend"), sorted({(op, head.backend) for op, head in RANGES}), ids=str
)
def test_the_ranges_of_an_op_cover_what_is_served(op: str, backend: str) -> None:
    """From the least to the largest number of rows, unless a head says what becomes of more."""
    module = registry.implementations(op)[backend]
    limits = [(each.m[0], each.m[1]) for each in getattr(module, "SUPPORTED_PROBLEMS", ())]
    limits = limits or [(1, UNBOUNDED)]
    heads = [head for named, head in RANGES if (named, head.backend) == (op, backend)]
    shown = [row_interval(head.range_of(op)) for head in heads]
    assert min(least for least, _ in shown) == min(least for least, _ in limits)
    if not any("more rows" in head.range_of(op) for head in heads):
        most = max(UNBOUNDED if most is None else most for _, most in shown)
        assert most == max(most for _, most in limits)


@pytest.mark.parametrize("head", KERNELS, ids=_name)
def test_the_ops_named_reach_the_kernel(head: KernelHead) -> None:
    """The op's implementation imports a module that names the source or the C function."""
    assert set(head.ops) <= set(registry.op_names())
    text = (ROOT / head.path).read_text()
    if head.backend == "cpu" and head.path.suffix == ".cpp":
        functions = re.findall(r'(?:extern "C" \w+ |^MILL_GROUPWISE_FUNCTIONS\()(\w+)', text, re.M)
        words = [f'"{name}"' for name in functions]
    else:
        words = [f'"{head.path.stem}"']
    assert words
    for op in head.ops:
        reached = _reached(head.backend, op)
        if head.path.suffix == ".py":
            assert ROOT / head.path in reached, op
        elif op == "decode" and head.path.stem != "decode":
            assert "common/ops.h" in text, "decode.cpp calls what ops.h declares"
        else:
            sources = [path.read_text() for path in reached]
            assert any(word in source for word in words for source in sources), op


def test_every_implementation_has_a_kernel() -> None:
    named = {(op, head.backend) for head in KERNELS for op in head.ops}
    there = {
        (op, backend)
        for backend in BACKENDS
        for op in registry.op_names()
        if any((ROOT / OPS / backend).glob(f"*/{op}.py"))
    }
    assert there - named == set()
    assert named - there == set()


@pytest.mark.parametrize("head", SHARED, ids=_name)
def test_shared_files_name_their_users(head: KernelHead) -> None:
    if head.path.suffix in (".h", ".cuh"):
        name = "/".join(head.path.parts[-2:])
        backend = ROOT / OPS / head.backend
        users = {
            path.name
            for path in backend.rglob("*.*")
            if path.suffix in NATIVE_SUFFIXES and name in INCLUDE.findall(path.read_text())
        }
    elif head.path.suffix == ".py":
        module = ".".join(head.path.with_suffix("").parts)
        package, _, stem = module.rpartition(".")
        imports = re.compile(rf"from ({module} import|{package} import [^\n]*\b{stem}\b)")
        users = {
            path.name
            for path in (ROOT / "modelmill").rglob("*.py")
            if imports.search(path.read_text())
        }
    else:  # part of the library without an op
        users = set(head.users)
        functions = re.findall(r"(\w+)\([^;{}]*\) {", (ROOT / head.path).read_text())
        (user,) = ((ROOT / head.path).with_name(name) for name in head.users)
        assert any(re.search(rf"\b{name}\b", user.read_text()) for name in functions)
    assert set(head.users) == users


@pytest.mark.parametrize("head", HEADS, ids=_name)
def test_techniques_named_are_in_the_source(head: KernelHead) -> None:
    """Each technique that a head names is used by the file or by its family's headers."""
    technique = head.fields["Technique"]
    text = _with_includes(head.path, common=head.backend == "cpu" or head.family == "common")
    for name, pattern in TECHNIQUES[head.backend].items():
        if re.search(rf"\b{re.escape(name)}(?![A-Z])", technique):
            assert re.search(pattern, text), f"{name} is not in the source"


def test_fields_go_on_in_indented_lines(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(
        "// Title of\n// two lines.\n//\n// Computes: a\n//     and b\n"
        "// Range: M ≤ 4 (two: M = 1; three: M ≥ 9 or so); K even\n// Ops: one, two (x.py)\n"
        "//\n// Macros: NONE\n#include <x>\n// Technique: none\n"
    )
    head = read_head(tmp_path, Path("kernel.cu"))
    assert head.title == "Title of two lines."
    assert head.fields["Computes"] == "a and b"
    assert head.fields.keys() == {"Computes", "Range", "Ops"}
    assert head.ops == ("one", "two")
    assert head.range_of("one") == "M ≤ 4; K even"
    assert head.range_of("two") == "M = 1"
    assert head.range_of("three") == "M ≥ 9 or so"

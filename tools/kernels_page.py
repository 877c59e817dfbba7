"""``python -m tools.kernels_page``: write docs/kernels.md and docs/kernels, or ``--check``.

docs/kernels.md is the overview; each family of kernels has a page, docs/kernels/<family>.md.

Rows are op × kernel file. What a kernel computes, its range and technique come from the head of its
file (tools/kernel_heads.py), its share of the ceiling from the newest rows of benchmarks/results,
its tests from the tests that import or name it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tools import generated_page
from tools.kernel_heads import OPS, KernelHead, read_heads
from tools.performance.rows import LAUNCH_BOUND_BYTES, Row, read_rows

PAGE = Path("docs/kernels.md")
FAMILY_PAGES = Path("docs/kernels")
RESULTS = Path("benchmarks/results")
TESTS = Path("tests")
EVERY_OP_TEST = "tests/ops/test_implementations.py"
NOTE = "<!-- Made by `make kernels` from the heads of the kernel files and benchmarks/results. -->"
INTRO = (
    "One row for each op and kernel file of `modelmill/ops/cuda`, `modelmill/ops/triton` and "
    "`modelmill/ops/cpu`. The registry takes the first backend that serves the arguments; the "
    "torch reference in `modelmill/ops/<op>.py` serves the rest. Dtypes, range and technique are "
    "those that the file's head states, where layout and formula are, too.",
    "*Of the ceiling*: the measured share of the device's memory bandwidth (of a copy; a kernel "
    "that mostly reads may exceed it) or of the rate of torch's matrix products (which a faster "
    "kernel exceeds), in the newest row of the largest measured case of this op in this range "
    "(`benchmarks/ops.py`; on a CPU of a plain parallel read, one row of activations, "
    "`benchmarks/cpu_ops.py`). *launch*: the case is too small to tell. A dash: no row. The day is "
    "the row's; rows from before 2026-11-27 name no commit, and are of the code of that day. Every "
    "implementation also runs over its op's cases in `tests/ops/test_implementations.py`; the "
    "tests column names those of the kernel itself.",
)
HEADINGS = {
    "attention": "Attention and rotary embeddings",
    "gemm_16bit": "GEMM with 16-bit weights",
    "w8a8_gemm": "GEMM with 8-bit activations",
    "weight_only_gemm": "Weight-only GEMM",
    "moe": "Mixtures of experts",
    "norm_quantize": "Norms, activation functions and quantization",
    "sampling": "Sampling",
    "vision": "Segmentation masks",
    "decoder": "Whole decoder",
}
COLUMNS = ("op", "backend", "file", "dtypes", "range", "technique", "of the ceiling", "tests")
HELPERS = "Shared files"
SAME_CALL = "in the figure above"  # of kernels that one call launches
MAX_USERS = 3  # files that are named; more are counted
CASE_PATTERNS = {
    "prefill": r"prefill",
    "decode": r"decode",
    "value_dim": r"latent",
    "int8 pages": r".*-int8",
    "16-bit pages": r"(?!.*-(int8|fp8))",
    "16-bit activations": r".*-16x8",
    "8-bit activations": r"(?!.*-16x8)",
    "groups of 128 or more": r"(?!.* g(32|64)\b)",
    "biases": r"biased|plain",
    "relative positions": r"(?!biased|plain)",
}
"""Words of a range, and what the name of a benchmark's case is where they hold."""
_WEIGHT_LIMIT = re.compile(r"N · K (<|≥) 2\^(\d+)")


def row_interval(text: str) -> tuple[int, int | None]:
    """The numbers of rows of a range: (least, most or None), from its first condition on M."""
    first = text.partition(" (")[0]
    between = re.search(r"(\d+) ≤ M ≤ (\d+)", first)
    if between:
        return int(between[1]), int(between[2])
    for sign, number in re.findall(r"M (=|≤|≥) (\d+)", first)[:1]:
        limits = {"=": (int(number), int(number)), "≤": (1, int(number)), "≥": (int(number), None)}
        return limits[sign]
    return 1, None


def serves_case(text: str, case: str) -> bool:
    """Whether a range covers a benchmark's case ("64x4096->12288 g128", "decode-8-4096-int8")."""
    first = text.partition(" (")[0]
    words = re.findall("|".join(rf"\b{word}\b" for word in CASE_PATTERNS), first)
    if not all(re.match(CASE_PATTERNS[word], case) for word in words):
        return False
    rows, (least, most) = re.match(r"(\d+)x", case), row_interval(text)
    if rows is None:
        return (least, most) == (1, None)
    if not least <= int(rows[1]) or (most is not None and int(rows[1]) > most):
        return False
    size, limit = re.match(r"\d+x(\d+)->(2x)?(\d+)", case), _WEIGHT_LIMIT.search(first)
    if limit is None or size is None:
        return True
    weights = int(size[1]) * int(size[3]) * (2 if size[2] else 1)
    return (weights < 1 << int(limit[2])) == (limit[1] == "<")


def largest_row(
    rows: Iterable[Row], op: str, head: KernelHead, preceding_ranges: Sequence[str]
) -> Row | None:
    """The newest row of the largest case that the kernel serves for an op, or None.

    taken: ranges of the kernels that come before this one for the op; their cases are not its.
    """
    text = head.range_of(op)
    newest: dict[str, dict[str, Row]] = {"bfloat16": {}, "float32": {}}
    for row in rows:
        if row.get("op") != op or row.get("variant") != head.backend or "fraction" not in row:
            continue
        before = any(serves_case(each, row["case"]) for each in preceding_ranges)
        if row["dtype"] in newest and serves_case(text, row["case"]) and not before:
            newest[row["dtype"]][row["case"]] = row
    best = (newest["bfloat16"] or newest["float32"]).values()
    return max(best, key=lambda row: _size(row, "tflops") or _size(row, "gbps"), default=None)


def _size(row: Row, rate: str) -> float:
    """Operations or bytes of a case, rounded so that equal cases are equal."""
    return float(f"{row.get(rate, 0.0) * row['value']:.2g}")


def largest_cpu_row(rows: Iterable[Row], op: str) -> Row | None:
    """The newest row of the largest case of one row of activations of an op on a CPU, or None."""
    newest: dict[str, Row] = {}
    for row in rows:
        if row.get("op") == op and "of_read" in row and row["rows"] == 1:
            newest[row["shape"], row["dtype"]] = row  # type: ignore[index]
    return max(newest.values(), key=lambda row: row["ours"], default=None)


def share_cell(row: Row | None) -> str:
    """Share of the ceiling, the case, the device and the day."""
    if row is None:
        return "–"
    share = row["fraction"] if "fraction" in row else row["of_read"]
    moved = 1e3 * (row["gbps"] * row["value"] if "gbps" in row else row["gb_s"] * row["ours"])
    small = moved < LAUNCH_BOUND_BYTES and row.get("bound", "memory") == "memory"
    shown = "launch" if small else f"**{share:.2f}**" if share >= 0.1 else f"**{share:.2g}**"
    case = row.get("case") or f"{row['shape']}, {row['dtype']}"
    device = re.sub(r"NVIDIA |\(R\)|, \d+ \w+$", "", row["device"])
    return f"{shown} ({case}; {device}, {row['date'][:10]})"


def comes_after(head: KernelHead) -> tuple[str, ...]:
    """Files that the range says are asked first ("where x.cu does not apply")."""
    where = re.search(r"^[^(]*?where (.*?) do(?:es)? not apply", head.fields.get("Range", ""))
    return tuple(re.findall(r"\w+\.cu\b", where[1])) if where else ()


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Dotted names that a test of ops imports, and native sources that it names."""
    text = path.read_text(encoding="utf-8")
    names = set(re.findall(r"\b\w+\.(?:cu|cpp|h|cuh)\b", text))
    if "modelmill.ops" not in text:  # no kernel's module
        return frozenset(names)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(names)


@cache
def _test_files(root: Path) -> dict[str, Path]:
    """The files that may test one kernel, by their paths from ``root``, in order."""
    paths = {
        path.relative_to(root).as_posix(): path
        for path in sorted((root / TESTS).rglob("test_*.py"))
    }
    return {
        name: path
        for name, path in paths.items()
        if name != EVERY_OP_TEST and "tests/tools/" not in name
    }


def tests_of(root: Path, head: KernelHead) -> list[str]:
    """Test files that name the kernel's source or import the module that launches it."""
    stem = head.path.stem
    dotted = ".".join(head.path.with_suffix("").parts)
    test_files = []
    for name, path in _test_files(root).items():
        if {head.path.name, dotted} & imported_names(path) or path.stem == f"test_{stem}_emulated":
            test_files.append(name)
    return test_files


def op_family(root: Path, op: str) -> str:
    """The sub-folder of an op's implementations; the same in every backend."""
    return next((root / OPS).glob(f"*/*/{op}.py")).parent.name


def render_table(
    root: Path, ops: Sequence[str], heads: Sequence[KernelHead], rows: Mapping[str, list[Row]]
) -> list[str]:
    """The table of a family, by op; what a file's head says of all its ops stands at the first."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    by_name = {head.path.name: head for head in heads}
    described: set[Path] = set()
    for op in ops:
        shown = op
        row: Row | None = None
        for head in (each for each in heads if op in each.ops):
            preceding_ranges = [by_name[n].range_of(op) for n in comes_after(head) if n in by_name]
            above = row
            row = (
                largest_cpu_row(rows["cpu"], op)
                if head.backend == "cpu"
                else largest_row(rows["h200"], op, head, preceding_ranges)
            )
            tests = tests_of(root, head)[:3] or [EVERY_OP_TEST]
            of_all_ops = [head.fields["Dtypes"], head.fields["Technique"], _test_links(tests)]
            if head.path in described:
                of_all_ops = ["as above"] * len(of_all_ops)
            described.add(head.path)
            dtypes, technique, test_links = of_all_ops
            cells = (
                f"`{shown}`" if shown else "",
                head.backend,
                f"[{head.path.name}](../{head.path.as_posix()})",
                dtypes,
                head.range_of(op),
                technique,
                share_cell(row) if row is None or row is not above else SAME_CALL,
                test_links,
            )
            lines.append("| " + " | ".join(cells) + " |")
            shown = ""
    return lines


def _test_links(tests: Sequence[str]) -> str:
    return ", ".join(f"[{Path(each).stem.removeprefix('test_')}](../{each})" for each in tests)


def render_helpers(heads: Sequence[KernelHead]) -> list[str]:
    """The table of headers and modules that kernels share."""
    lines = ["| file | what | technique | used by |", "|---|---|---|---|"]
    for head in heads:
        name = head.path.relative_to(OPS).as_posix()
        cells = (f"[{name}](../{head.path.as_posix()})", head.title.rstrip("."))
        users = ", ".join(head.users[:MAX_USERS])
        if len(head.users) > MAX_USERS:
            users = f"{len(head.users)} files, which its head names"
        lines.append("| " + " | ".join((*cells, head.fields["Technique"], users)) + " |")
    return lines


def render_pages(root: Path) -> dict[Path, str]:
    """Every page of the repository at ``root``, by its path below it."""
    heads = read_heads(root)
    rows = {name: read_rows(root / RESULTS / f"{name}.jsonl") for name in ("h200", "cpu")}
    families: dict[str, list[str]] = {}
    for op in sorted({op for head in heads for op in head.ops}):
        families.setdefault(op_family(root, op), []).append(op)
    pages, overview = {}, ["| page | ops |", "|---|---|"]
    for family, heading in HEADINGS.items():
        ops = families.get(family, [])
        if ops:
            path = FAMILY_PAGES / f"{family}.md"
            pages[path] = _family_page(heading, render_table(root, ops, heads, rows))
            listed = ", ".join(f"`{op}`" for op in ops)
            overview.append(f"| [{heading}]({path.relative_to(PAGE.parent)}) | {listed} |")
    helpers = [head for head in heads if not head.ops]
    path = FAMILY_PAGES / "shared.md"
    pages[path] = _family_page(HELPERS, render_helpers(helpers))
    overview.append(f"| [{HELPERS}]({path.relative_to(PAGE.parent)}) | |")
    pages[PAGE] = "\n\n".join(["# Kernels", NOTE, *INTRO, "\n".join(overview)]) + "\n"
    return pages


def _family_page(title: str, table: Sequence[str]) -> str:
    text = "\n".join(table).replace("](../", "](../../")
    return (
        f"# {title}\n\n{NOTE}\n\nColumns and their meaning: [Kernels](../kernels.md).\n\n{text}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or with --check 1 where the page is stale."""
    return generated_page.run_pages(argv, __doc__, "kernels", render_pages, FAMILY_PAGES)


if __name__ == "__main__":
    sys.exit(main())

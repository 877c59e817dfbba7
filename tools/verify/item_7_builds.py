"""Two builds of one checkpoint are the same bytes, in float32 and with weights of 8 bits."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "Two builds of one checkpoint are bit-identical"
BUILDS = (("float32", "none"), ("bfloat16", "int8"))
NOT_COMPARED = "acceptance.json"
"""Its last digits depend on the machine that ran the check."""


def run(context: VerifyContext) -> VerifyResult:
    """SmolLM2 twice by each recipe, the second time into another folder."""
    rows = [_fact(context, dtype, recipe) for dtype, recipe in BUILDS]
    notes = [
        f"Every file of both engines but {NOT_COMPARED}, by sha256; the manifest too. "
        "tests/builder builds small models twice with int4 and smoothquant as well."
    ]
    return make_result(rows, notes)


def file_digests(engine: Path) -> dict[str, str]:
    """The sha256 of each file of an engine, by its path inside."""
    files = sorted(path for path in engine.rglob("*") if path.is_file())
    return {
        path.relative_to(engine).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != NOT_COMPARED
    }


def same_files(first: dict[str, str], second: dict[str, str]) -> tuple[str, bool]:
    """What a comparison of two engines' files says, and whether all are equal."""
    names = first.keys() | second.keys()
    differing = sorted(name for name in names if first.get(name) != second.get(name))
    summary = f"{len(names) - len(differing)} of {len(names)} files"
    if differing:
        summary += f"; differ: {', '.join(differing[:5])}"
    return summary, bool(names) and not differing


def _fact(context: VerifyContext, dtype: str, recipe: str) -> Fact:
    from modelmill.core.config import BuildConfig
    from modelmill.llm import build_engine

    first, second = context.engine(dtype, recipe), context.out / "second.engine"
    shutil.rmtree(second, ignore_errors=True)
    context.log(f"  building {first.name} again")
    config = BuildConfig(dtype=dtype, quantization=recipe, target="cpu")
    build_engine(context.gguf, second, config, check=False)
    summary, passed = same_files(file_digests(first), file_digests(second))
    shutil.rmtree(second)
    return Fact(f"{dtype}, {recipe}: equal files", summary, passed)

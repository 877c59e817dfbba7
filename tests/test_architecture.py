"""The floor plan, kept true: every import is read with ast and must go down."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from modelmill.ops.registry import op_declarations
from tests.source_files import each_file, facts, parse

ROOT = Path(__file__).resolve().parent.parent / "modelmill"

# room → rooms it may import (docs/architecture.md draws it)
MAY = {
    "core": set(),
    "ops": {"core"},
    "parallel": {"core", "ops.triton"},
    "text": {"core"},
    "weights": {"core", "ops"},
    "nn": {"core", "ops", "weights", "parallel"},
    "checkpoint": {"core", "weights"},
    "artifact": {"core", "weights"},
    "models": {"core", "ops", "nn", "checkpoint.rename"},
    "loader": {"core", "parallel", "ops", "weights", "nn", "artifact"},
    "vision": {"core", "ops", "nn", "artifact", "loader"},
    "runtime": {
        *("core", "parallel", "ops", "weights", "nn", "artifact", "loader"),
        "vision.encoder_runner",
    },
    "quant": {"core", "ops", "weights", "nn", "checkpoint"},
    "builder": {
        *("core", "checkpoint", "weights", "nn", "quant", "artifact", "ops"),
        *("text.tokenizer_loader", "text.image_chat", "vision.image_input"),
    },
    "accept": {
        "core",
        "runtime",
        "vision",
        "nn.linear",
        "nn.forward_hooks",
        "nn.layer_spec",
        "nn.layer_stack",
        "nn.vision_context",
        "loader.model_loader",
        "checkpoint",
        "artifact",
        "text",
    },
    "outputs": {"core"},
    "request_output_state": {"core", "text", "outputs"},
    "text_processor": {
        "core",
        "text",
        "artifact.manifest",
        "request_output_state",
        "vision.image_input",
    },
    "progress_display": {"core"},
    "opened_engine": {"core", "progress_display"},
    "llm": {
        *(
            "core",
            "progress_display",
            "opened_engine",
            "loader.device",
            "runtime",
            "artifact",
            "outputs",
            "request_output_state",
            "text_processor",
        ),
        *("builder", "accept", "checkpoint"),
    },
    "segmenter": {
        "core",
        "progress_display",
        "opened_engine",
        "vision",
        "loader.device",
        "artifact",
        "llm",
    },
    "async_llm": {
        "core",
        "opened_engine",
        "outputs",
        "request_output_state",
        "text_processor",
        "llm",
    },
    "serve": {
        "core",
        "text",
        "vision",
        "artifact",
        "loader",
        "runtime",
        "outputs",
        "request_output_state",
        "text_processor",
        "llm",
    },
    "export": {
        "core",
        "artifact",
        "outputs",
        "request_output_state",
        "text_processor",
        "async_llm",
    },
    "eval": {
        "core",
        "ops",
        "nn",
        "text",
        "checkpoint",
        "artifact",
        "runtime",
        "builder",
        "accept",
        "outputs",
        "request_output_state",
        "llm",
    },
}
TOP = {"cli", "__init__", "__main__"}
FOREIGN_HOME = {
    "triton": ("ops/triton",),
    "transformers": ("eval",),
    "rouge_score": ("eval",),
    "matplotlib": ("eval",),
    "PIL": ("vision", "cli"),
    "tiktoken": ("text",),
    "sentencepiece": ("text",),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "huggingface_hub": ("checkpoint/pull.py",),
    "fastapi": ("serve",),
    "starlette": ("serve",),
    "uvicorn": ("serve",),
    "prometheus_client": ("serve",),
    "ray": ("serve/replicas",),
    "opentelemetry": ("serve/traces.py",),
    "llguidance": ("text/grammar.py", "text/gbnf.py"),
    "typer": ("cli",),
    "rich": ("cli", "eval", "progress_display.py"),
}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Sequence[tuple[str, int]]:
    """Every imported module of a file, wherever in the file the import stands."""
    return facts(path).imports


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@each_file(files())
def test_imports_go_down(path: Path) -> None:
    """No file imports a room that its floor may not see."""
    here = room(path)
    if here in TOP:
        return
    for name, line in imports(path):
        if name == "modelmill":
            continue  # the package itself: its version
        if not name.startswith("modelmill."):
            continue
        inner = name.removeprefix("modelmill.")
        target = inner.split(".")[0]
        if target == here:
            continue
        allowed = any(inner == a or inner.startswith(a + ".") or a == target for a in MAY[here])
        assert allowed, (
            f"{path.relative_to(ROOT)}:{line} imports {name}; {here} may import {sorted(MAY[here])}"
        )


@each_file(sorted((ROOT / "accept" / "reference").rglob("*.py")))
def test_the_reference_shares_no_code_with_the_engine(path: Path) -> None:
    """It would repeat the engine's faults: of ours it may import errors and the search of files."""
    allowed = (
        "modelmill.accept.reference",
        "modelmill.core.errors",
        "modelmill.core.module_lookup",
    )
    for name, line in imports(path):
        assert not name.startswith("modelmill") or name.startswith(allowed), (
            f"{path.relative_to(ROOT)}:{line} imports {name}"
        )


@each_file(files())
def test_foreign_packages_have_one_home(path: Path) -> None:
    """A foreign package is imported in its home only; pickle and remote code nowhere; the
    environment in core/env.
    """
    where = str(path.relative_to(ROOT))
    text = path.read_text()
    for name, line in imports(path):
        package = name.split(".")[0]
        assert package not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, (
            f"{where}:{line} imports {package}"
        )
        for foreign, homes in FOREIGN_HOME.items():
            if package == foreign:
                assert where.startswith(homes), (
                    f"{where}:{line} imports {foreign}, whose home is {homes}"
                )
    if where != "core/env.py":
        assert "os.environ" not in text, f"{where} reads the environment; core/env.py does that"
        assert "getenv" not in text, f"{where} reads the environment; core/env.py does that"


def test_variants_know_nothing_of_ours() -> None:
    """Kernels for GPUs import their language, torch and each other, not our rooms.

    Except core, what kernels of both languages agree on where one stands behind the other, the
    data by which the registry chooses kernels, and the inputs of an op (those of qkv_rope_cache
    are rope_cache's; recurrences take RecurrentStepMetadata).
    """
    common = ("modelmill.core", "modelmill.ops.carveout")
    ranges = (
        "kernel_support",
        "row_op_support",
        "attention_support",
        "rope_cache_support",
        "moe_support",
    )
    chosen_by = ("modelmill.ops.bound_op", *(f"modelmill.ops.{each}" for each in ranges))
    inputs_of_ops = {
        each.inputs.__module__ for each in op_declarations().values() if each.inputs is not None
    } | {"modelmill.ops.recurrent_metadata"}
    for backend in ("triton", "cuda"):
        own = f"modelmill.ops.{backend}"
        for path in (ROOT / "ops" / backend).rglob("*.py"):
            inputs = f"modelmill.ops.{path.stem.removeprefix('qkv_')}"  # of its own op
            for name, line in imports(path):
                allowed = not name.startswith("modelmill.") or name.startswith((*common, own))
                allowed = allowed or name in (inputs, *chosen_by, *inputs_of_ops)
                assert allowed, f"{path.name}:{line} imports {name}"


@each_file(files())
def test_ranks_meet_in_one_room(path: Path) -> None:
    """torch.distributed is imported in ``parallel`` only, and no module sets up the default
    process group.
    """
    where = str(path.relative_to(ROOT))
    for name, line in imports(path):
        distributed = name.startswith(("torch.distributed", "torch._C._distributed"))
        assert not distributed or where.startswith("parallel/"), f"{where}:{line} imports {name}"
    assert "init_process_group" not in path.read_text(), (
        f"{where}: the default group is the caller's"
    )


@each_file(files())
def test_functions_fit_on_a_screen(path: Path) -> None:
    """A function's body has fewer than 60 lines; kernels may have more."""
    if path.is_relative_to(ROOT / "ops" / "triton"):
        return
    for function in facts(path).functions:
        assert function.length < 60, (
            f"{path.relative_to(ROOT)}:{function.line}: {function.name} has {function.length} "
            "lines; divide it"
        )


def test_importing_is_light() -> None:
    """``import modelmill`` and the command line's main must not import torch."""
    import subprocess
    import sys

    code = (
        "import sys, modelmill, modelmill.cli.main; assert 'torch' not in sys.modules, 'torch "
        "is imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_skipped_modules_lend_nothing() -> None:
    """A test module that skips itself as a whole is not imported by another: pytest leaves it half
    made in sys.modules, so that where the package it wants is missing the importer fails instead of
    being skipped."""
    tests = Path(__file__).resolve().parent
    skipping = {
        ".".join(("tests", *path.relative_to(tests).with_suffix("").parts))
        for path in tests.rglob("test_*.py")
        if any(
            "importorskip" in ast.unparse(line) for line in parse(path).body if not _defines(line)
        )
    }
    for path in tests.rglob("*.py"):
        for name, line in imports(path):
            assert name not in skipping, (
                f"{path.relative_to(tests)}:{line} imports {name}, which may skip itself"
            )


def _defines(line: ast.stmt) -> bool:
    return isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)

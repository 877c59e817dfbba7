"""Faults planted in our own build path, one at a time: refused in every dtype, and named."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = (
    "A fault planted in our own build path is refused in every dtype, and compare names its "
    "layer and module"
)
TINY = ("llama", "gpt2", "qwen", "qwen2", "qwen3", "mistral")
SMOLLM2 = ("o_proj x 1.05", "gate and up swapped")
DEEP = 3
# Options of a recipe that would otherwise look at calibration texts: the faults are the same.
INT4 = {"method": "nearest", "group_size": 32}


@dataclass
class FaultCounts:
    """Of one fault: how often it was refused and named, and what went wrong."""

    tried: int = 0
    refused: int = 0
    named: int = 0
    compared: int = 0
    names: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def run(context: VerifyContext) -> VerifyResult:
    """Tiny models of every family, then SmolLM2; every dtype, whole, in int8 and in int4."""
    rows = []
    with tempfile.TemporaryDirectory(dir=context.out) as folder:
        root = Path(folder)
        for model, checkpoint, layer, fault_names in _models(context, root):
            rows.append(_check_without_fault(context, model, checkpoint, root))
            rows += _faults(context, model, checkpoint, layer, fault_names, root)
        rows.append(_check_unfit_shape(root))
    notes = [
        "Each fault is a patch of modelmill's own code (tests/accept/planted_faults.py), active "
        "while the engine is "
        "built and while it runs; the reference reads the checkpoint without that code. float32, "
        "float16 and bfloat16, "
        "each with `-q none`, `-q int8` and `-q int4 --method nearest --group-size 32`. Refused: "
        "the error names the "
        "layer and module, and nothing is left on the disk. Compare: an engine built without "
        "acceptance, then what "
        "`modelmill compare` computes.",
        f"A fault of one layer sits in layer 1 (SmolLM2: {DEEP}); RoPE base and eps are wrong in "
        "all layers, and the "
        "first is named.",
    ]
    return make_result(rows, notes)


def _models(
    context: VerifyContext, root: Path
) -> Iterator[tuple[str, Path, int, tuple[str, ...] | None]]:
    from tests.accept.build_and_accept import save_tiny

    for family in TINY:
        yield f"tiny {family}", save_tiny(family, root / family), 1, None
    yield "SmolLM2", context.gguf, DEEP, SMOLLM2


def _check_without_fault(context: VerifyContext, model: str, checkpoint: Path, root: Path) -> Fact:
    from tests.accept.build_and_accept import build_and_accept

    context.log(f"  {model}: no fault")
    bad = []
    settings = _settings()
    for dtype, recipe in settings:
        report, written = build_and_accept(
            checkpoint, root / "e", dtype, recipe, **_options(recipe)
        )
        shutil.rmtree(root / "e", ignore_errors=True)
        if not written:
            bad.append(f"{dtype} {recipe}: {report.get('reason')}")
    summary = f"{len(settings) - len(bad)} of {len(settings)} accepted"
    return Fact(
        f"{model}, no fault: accepted in every dtype and recipe",
        "; ".join([summary, *bad]),
        not bad,
    )


def _faults(
    context: VerifyContext,
    model: str,
    checkpoint: Path,
    layer: int,
    fault_names: tuple[str, ...] | None,
    root: Path,
) -> Iterator[Fact]:
    from modelmill.checkpoint.open import open_checkpoint
    from tests.accept.planted_faults import faults

    opened = open_checkpoint(checkpoint)
    square = _square(opened.config)
    for fault in faults(opened.model_type, layer=layer):
        if (fault.needs_square and not square) or (
            fault_names is not None and fault.name not in fault_names
        ):
            continue
        context.log(f"  {model}: {fault.name}")
        tally = FaultCounts()
        for dtype, recipe in _settings():
            _try_fault(tally, fault, opened.model_type, checkpoint, root, (dtype, recipe))
        all_named = tally.refused == tally.named == tally.compared == tally.tried > 0
        names = ", ".join(f"{name} ({count}×)" for name, count in sorted(tally.names.items()))
        summary = (
            f"refused {tally.refused} of {tally.tried}, named {tally.named}, by compare "
            f"{tally.compared}: {names}"
        )
        yield Fact(f"{model}: {fault.name}", "; ".join([summary, *tally.wrong]), all_named)


def _try_fault(
    tally: FaultCounts,
    fault: Any,
    model_type: str,
    checkpoint: Path,
    root: Path,
    setting: tuple[str, str],
) -> None:
    """One fault in one dtype and recipe: through the build, then through compare."""
    from tests.accept.build_and_accept import build_and_accept
    from tests.accept.planted_faults import plant_fault

    out = root / "e"
    tally.tried += 1
    before = sorted(path.name for path in root.iterdir())
    with plant_fault(fault, model_type):
        report, written = build_and_accept(checkpoint, out, *setting, **_options(setting[1]))
        left = sorted(path.name for path in root.iterdir())
        if "refusal" in report and not written and left == before:
            tally.refused += 1
        else:
            tally.wrong.append(f"{' '.join(setting)} was written")
        if _named_correctly(
            report, fault
        ) and f"layer {fault.layer}, module {report['module']}" in report.get("refusal", ""):
            tally.named += 1
        else:
            tally.wrong.append(f"{' '.join(setting)}: {report.get('verdict')}")
        shutil.rmtree(out, ignore_errors=True)
        compared = _compare(checkpoint, out, *setting)
        shutil.rmtree(out, ignore_errors=True)
    if _named_correctly(compared, fault):
        tally.compared += 1
    else:
        tally.wrong.append(f"compare {' '.join(setting)}: {compared['verdict']}")
    name = f"layer {compared['layer']}, {compared['module']}"
    tally.names[name] = tally.names.get(name, 0) + 1


def _settings() -> list[tuple[str, str]]:
    """(dtype, recipe)."""
    from tests.accept.build_and_accept import SETTINGS

    return [
        *SETTINGS,
        *((dtype, "int4") for dtype in dict.fromkeys(dtype for dtype, _ in SETTINGS)),
    ]


def _options(recipe: str) -> dict[str, Any]:
    return INT4 if recipe == "int4" else {}


def _named_correctly(report: dict[str, Any], fault: Any) -> bool:
    return report.get("layer") == fault.layer and report.get("module") in fault.modules


def _compare(checkpoint: Path, out: Path, dtype: str, recipe: str) -> dict[str, Any]:
    """Return what ``compare`` says of an engine built without acceptance."""
    from modelmill.accept.run import acceptance_token_ids, compare_engine
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_build_plan
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.core.config import BuildConfig, RunConfig
    from modelmill.runtime.engine_core import EngineCore

    opened = open_checkpoint(checkpoint)
    config = BuildConfig(dtype=dtype, quantization=recipe, target="cpu", **_options(recipe))
    build(make_build_plan(opened, config), out, None)
    loop = EngineCore.open(
        out, RunConfig(device="cpu", max_model_len=_length(out), kv_cache_bytes=1 << 28)
    )
    assert loop.artifact is not None
    return compare_engine(loop, opened, acceptance_token_ids(loop.artifact))


def _length(engine: Path) -> int:
    return min(int(json.loads((engine / "manifest.json").read_text())["max_model_len"]), 512)


def _square(config: dict[str, Any]) -> bool:
    """Whether o_proj is square, so that its transpose fits."""
    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if heads is None or hidden is None:
        raise ValueError("the config has no number of heads, or no hidden size")
    dim = config.get("head_dim") or config.get("kv_channels") or hidden // heads
    return bool(heads * dim == hidden)


def _check_unfit_shape(root: Path) -> Fact:
    """Check that GPT-2's c_attn [in, 3·in], not transposed, is refused before weights are read."""
    from dataclasses import replace
    from unittest import mock

    from modelmill.builder.plan import make_build_plan
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.core.config import BuildConfig
    from modelmill.core.errors import TensorMismatch
    from modelmill.models import gpt2

    real_rules = gpt2.CHECKPOINT_LAYOUT.rename_rules

    def wrong(config: Any) -> Any:
        return [
            replace(r, how="copy") if "c_attn.weight" in r.sources[0] else r
            for r in real_rules(config)
        ]

    with mock.patch.object(gpt2, "rename_rules", wrong, create=True):
        try:
            make_build_plan(open_checkpoint(root / "gpt2"), BuildConfig())
        except TensorMismatch as error:
            return Fact(
                "tiny gpt2: c_attn not transposed",
                f"refused by its shape: {error}",
                "c_attn" in str(error),
            )
    return Fact("tiny gpt2: c_attn not transposed", "was planned", False)

"""Every family against an independent float32 reference on small seeded configs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

if TYPE_CHECKING:
    from torch import Tensor

    from modelmill.runtime.engine_core import EngineCore
    from tests.models.family_cases import FamilyCase

TITLE = "Every family: logits within 1e-4 of an independent float32 reference"
MAX_ERROR = 1e-4
PROMPT, LENGTHS = 20, (21, 33, 70)
LENGTH_FACTORS = (0.5, 1, 1.5, 3, 5)


def run(context: VerifyContext) -> VerifyResult:
    """The largest error of each form, computed here."""
    from tests.models.all_families import CASES

    rows = []
    with tempfile.TemporaryDirectory(dir=context.out) as folder:
        rows += [_family(name, Path(folder)) for name in _names()]
        rows += _qwen(Path(folder))
        for name, case in CASES.items():
            context.log(f"  {name}")
            rows.append(_case(name, case, Path(folder) / "cases" / name))
    notes = [
        f"Lengths {', '.join(map(str, LENGTHS))}: {PROMPT} tokens as prompt (in chunks of at most "
        "32, all sequences in "
        "one batch), the rest decoded token by token. The reference is transformers (eager "
        "attention, its own KV "
        "cache); for Qwen v1 a plain float64 reference in tests/accept/qwen_v1_plain.py, for "
        "families that transformers lacks a plain one in tests/models/families.",
        "One small seeded config of each; `make test-all` also runs every switch of its "
        "configuration class, and `make test-families` every recipe and planted fault.",
    ]
    return make_result(rows, notes)


def _names() -> list[str]:
    from tests.models.tiny_models import FAMILIES

    return list(FAMILIES)


def _family(name: str, folder: Path) -> Fact:
    import torch

    from tests.models.tiny_models import save_hf

    model = save_hf(name, folder / name)
    loop = open_engine_core(folder / name, folder / f"{name}.engine")
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 160, (n,), generator=draw).tolist() for n in LENGTHS]
    return _fact(name, _errors(loop, ids, lambda row: _stepwise_logits(model, row)))


def _case(name: str, case: FamilyCase, folder: Path) -> Fact:
    """A family of tests/models/families, beside the independent logits of its file."""
    from tests.models.saved_family import Saved, drawn_ids

    saved = Saved(case, folder)
    ids = drawn_ids(case.base["vocab_size"], LENGTHS)
    return _fact(name, _errors(saved.open(), ids, lambda row: saved.logits(row, PROMPT)))


def _errors(
    engine: EngineCore, ids: list[list[int]], expected: Callable[[list[int]], Tensor]
) -> dict[str, float]:
    """The largest error of the prompts, and of the tokens that are decoded behind them."""
    worst = {"prefill": 0.0, "decode": 0.0}
    for row, actual in zip(
        ids, TeacherForcedScorer(engine).compute_logits(ids, decode_from=PROMPT), strict=True
    ):
        error = (actual - expected(row)).abs().amax(-1)
        worst["prefill"] = max(worst["prefill"], float(error[:PROMPT].max()))
        worst["decode"] = max(worst["decode"], float(error[PROMPT:].max()))
    return worst


def _stepwise_logits(model: Any, ids: list[int]) -> Any:
    """Return transformers' logits [T, V]: a prompt, then token by token with its own cache."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor([ids[:PROMPT]]), use_cache=True)
        rows = [out.logits[0]]
        for token in ids[PROMPT:]:
            out = model(
                torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
            )
            rows.append(out.logits[0])
    return torch.cat(rows)


def _qwen(folder: Path) -> list[Fact]:
    """Check Qwen v1 at shares of seq_length, each alone and in one batch, across the boundaries."""
    import torch

    from tests.accept.qwen_v1_plain import plain_qwen_logits, seeded_qwen
    from tests.models.test_families import QWEN
    from tests.models.tiny_models import save_raw

    tensors = seeded_qwen(QWEN, 1)
    loop = open_engine_core(
        save_raw(folder / "qwen", tensors, QWEN), folder / "qwen.engine", max_model_len=200
    )
    draw = torch.Generator().manual_seed(4)
    prompts = [int(share * QWEN["seq_length"]) for share in LENGTH_FACTORS]
    ids = [torch.randint(0, 120, (n + 9,), generator=draw).tolist() for n in prompts]
    mixed = TeacherForcedScorer(loop).compute_logits(ids, decode_from=prompts)
    facts = []
    for share, n, row, many in zip(LENGTH_FACTORS, prompts, ids, mixed, strict=True):
        expected = plain_qwen_logits(tensors, QWEN, row, prompt=n)
        alone = TeacherForcedScorer(loop).compute_logits([row], decode_from=n)[0]
        errors = {
            "alone": float((alone - expected).abs().max()),
            "mixed in one batch": float((many - expected).abs().max()),
        }
        facts.append(_fact(f"qwen (v1), prompt {share} × seq_length", errors))
    return facts


def open_engine_core(checkpoint: Path, engine: Path, **options: Any) -> Any:
    """A float32 engine of a checkpoint, opened with small steps."""
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_build_plan
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.core.config import BuildConfig, RunConfig
    from modelmill.runtime.engine_core import EngineCore

    config = BuildConfig(dtype="float32", target="cpu", **options)
    build(make_build_plan(open_checkpoint(checkpoint), config), engine, None)
    return EngineCore.open(
        engine, RunConfig(device="cpu", max_num_batched_tokens=32, kv_cache_bytes=1 << 22)
    )


def _fact(name: str, errors: dict[str, float]) -> Fact:
    summary = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    return Fact(
        f"{name}: largest error ≤ {MAX_ERROR:g}",
        summary,
        all(error <= MAX_ERROR for error in errors.values()),
    )

"""A family's seeded checkpoint beside its float32 engine, and their logits compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.models.family_cases import FamilyCase
from tests.models.plain_forward import Logits

LENGTHS = (1, 7, 33, 70)
# one for each way of joining a layer's parts; make test runs all tests of these
REPRESENTATIVES = ("granite", "phi", "olmo2", "glm4")


def label(name: str) -> str:
    """A family in a test's name."""
    return name if name in REPRESENTATIVES else f"further-{name}"


class Saved:
    """A family's seeded checkpoint with its independent logits, and its float32 engine."""

    def __init__(self, case: FamilyCase, folder: Path, **changes: Any) -> None:
        self.case, self.folder = case, folder / "hf"
        self.logits: Logits = case.save(self.folder, **changes)
        self.engine = folder / "engine"
        build_engine(self.folder, self.engine)

    def open(self, **options: Any) -> EngineCore:
        defaults = {"device": "cpu", "max_num_batched_tokens": 32, "kv_cache_bytes": 1 << 22}
        return EngineCore.open(self.engine, RunConfig(**{**defaults, **options}))


def build_engine(checkpoint: Path, out: Path) -> None:
    config = BuildConfig(dtype="float32", target="cpu")
    build(make_build_plan(open_checkpoint(checkpoint), config), out, None)


def drawn_ids(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(2, vocab, (n,), generator=draw).tolist() for n in lengths]


def compare(
    engine: EngineCore,
    logits: Logits,
    ids: list[list[int]],
    decoded_from: tuple[int | None, ...] = (None, 5),
) -> None:
    """Chunked prompts in one batch (None), and with the tokens from a place on decoded singly."""
    for decode_from in decoded_from:
        results = TeacherForcedScorer(engine).compute_logits(ids, decode_from=decode_from)
        for actual, row in zip(results, ids, strict=True):
            expected = logits(row, decode_from)
            assert (actual - expected).abs().max() < 1e-4, f"decode_from={decode_from}"

"""Attention whose scores are so large that rounding its inputs is out of bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.attention_inputs import attend_to_engine_inputs
from modelmill.accept.reference import ModuleIO
from modelmill.nn.attention import AttentionCore
from tests.accept.build_and_accept import build_and_accept
from tests.accept.seeded_checkpoint import seeded_decoder
from tests.models.tiny_models import save_raw

QUERY_FACTOR = 50.0
"""It makes scores of some hundreds."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, config = seeded_decoder(seed=2)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= QUERY_FACTOR
    sizes = {"vocab_size": 200, "intermediate_size": 128, "max_position_embeddings": 128}
    return save_raw(tmp_path_factory.mktemp("large"), tensors, config | sizes)


def worst_errors(report: dict[str, Any]) -> list[float]:
    return [row["max_rel"] for row in report["layers"] if row["name"].endswith("attn.core")]


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.072), ("float16", 0.0081)])
def test_large_scores_are_judged_on_rounded_inputs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bound: float
) -> None:
    report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, "none")
    assert written, report["refusal"]
    errors = worst_errors(report)
    monkeypatch.setattr("modelmill.accept.module_check.attend_to_engine_inputs", lambda *_: None)
    report, written = build_and_accept(checkpoint, tmp_path / "unrounded", dtype, "none")
    assert not written
    assert report["module"] == "attn.core"
    outside = [
        error for error, other in zip(errors, worst_errors(report), strict=True) if other > bound
    ]
    assert outside, "the inputs' rounding alone is out of bounds"
    assert max(outside) < bound / 3, "the kernel's own error is not"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_fault_beside_large_scores_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    real_forward = AttentionCore.forward

    def scaled(self: Any, q: Any, step: Any) -> Any:
        return real_forward(self, q, step) * factor

    monkeypatch.setattr(AttentionCore, "forward", scaled)
    report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, "none")
    assert not written
    assert (report["layer"], report["module"]) == (0, "attn.core")


def test_tensors_of_other_sizes_are_not_compared() -> None:
    class Step:
        class kv:
            k = v = (torch.zeros(2, 1, 4, 8),)
            page_size = 4

        slots = torch.arange(3)

    rows = torch.zeros(3, 8)
    attention = ModuleIO((rows, rows, rows), rows, lambda q, k, v: q + k + v)
    assert attend_to_engine_inputs(attention, 0, torch.ones(3, 1, 8), Step()) is not None
    assert attend_to_engine_inputs(attention, 0, torch.ones(3, 2, 8), Step()) is None

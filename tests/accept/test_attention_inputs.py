"""Attention whose scores are so large that rounding its inputs is out of bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.attention_inputs import gather_attention_inputs
from modelmill.accept.reference import ModuleIO
from modelmill.nn.attention import AttentionCore
from tests.accept.build_and_accept import build_and_accept
from tests.accept.seeded_checkpoint import seeded_decoder
from tests.models.tiny_models import save_raw

QUERY_FACTOR = 50.0
"""It makes scores of some hundreds."""


SIZES = {"vocab_size": 200, "intermediate_size": 128, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, config = seeded_decoder(seed=2)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= QUERY_FACTOR
    return save_raw(tmp_path_factory.mktemp("large"), tensors, config | SIZES)


def worst_errors(report: dict[str, Any]) -> list[float]:
    return [row["max_rel"] for row in report["layers"] if row["name"].endswith("attn.core")]


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.072), ("float16", 0.0081)])
def test_large_scores_are_judged_on_rounded_inputs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bound: float
) -> None:
    report, written = build_and_accept(checkpoint, tmp_path / "e", dtype, "none")
    assert written, report["refusal"]
    errors = worst_errors(report)
    monkeypatch.setattr("modelmill.accept.module_check.gather_attention_inputs", lambda *_: None)
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_another_layers_pages_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scale: float
) -> None:
    """Their attention is right for what it read; a small o_proj hides it from the whole layer."""
    tensors, config = seeded_decoder(layers=3, seed=2)
    for layer in (1, 2):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= scale
    folder = save_raw(tmp_path / "c", tensors, config | SIZES)
    real_init = AttentionCore.__init__

    def read_first_layer(self: Any, spec: Any, cache_index: int) -> None:
        real_init(self, spec, 0)

    monkeypatch.setattr(AttentionCore, "__init__", read_first_layer)
    for path, layers in ((folder, {1}), (checkpoint, {0, 1})):
        # with large scores, layer 0 may be out of bounds as a whole for its own rounding
        report, written = build_and_accept(path, tmp_path / f"e-{path.name}", dtype, "none")
        assert not written
        assert report["layer"] in layers
        outside = [row["name"] for row in report["layers"] if not row["ok"]]
        assert "layers.1.attn.core" in outside


def test_tensors_of_other_sizes_are_not_compared() -> None:
    class Step:
        class kv:
            k = v = (torch.zeros(2, 1, 4, 8),)
            page_size = 4

        slots = torch.arange(3)

    rows = torch.zeros(3, 8)
    attention = ModuleIO((rows, rows, rows), rows, lambda q, k, v: q + k + v)
    assert gather_attention_inputs(attention, 0, torch.ones(3, 1, 8), Step()) is not None
    assert gather_attention_inputs(attention, 0, torch.ones(3, 2, 8), Step()) is None

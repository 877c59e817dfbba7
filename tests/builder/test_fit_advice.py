"""What a plan says of a model that does not fit: only what was planned, and fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder import memory_plan
from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.fit_advice import describe_plan, memory_report_on_largest_rank
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.core.config import BuildConfig

GIB = 1 << 30
SIX_LAYERS: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 6, "num_attention_heads": 32, "vocab_size": 32000,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(recipe, target, GiB of the device, ranks) → the plan and what it says of the memory."""
    (tmp_path / "config.json").write_text(json.dumps(SIX_LAYERS))

    def plan(recipe: str, target: str, gib: float, ranks: int = 1) -> tuple[BuildPlan, str]:
        room = int(gib * GIB)
        monkeypatch.setattr(memory_plan, "_device_memory_bytes", lambda _: (room, room))
        config = BuildConfig(quantization=recipe, target=target, dtype="bfloat16")
        made = make_build_plan(checkpoint_from_config(tmp_path), config)
        return made, str(describe_plan(made, ranks)["memory"]["fits"])

    return plan


@pytest.mark.parametrize(
    ("recipe", "gib", "advice"),
    [
        ("none", 64, ""),
        ("none", 3.5, "; -q int8 fits"),
        ("none", 3, "; -q int4 fits"),
        ("int8", 3, "; -q int4 fits"),
        ("none", 2.2, "; no recipe fits; what does: --tp 4 (4 such GPUs) or --tp 2 -q int8 (2 such "
                      "GPUs)"),
        ("int4", 1.8, "; no smaller recipe fits; what does: --tp 4 (4 such GPUs)"),
    ],
)  # fmt: skip
def test_only_what_fits_is_named(fits: Any, recipe: str, gib: float, advice: str) -> None:
    made, text = fits(recipe, "cuda", gib)
    assert text.endswith(advice)
    assert ("does not fit" in text) == bool(advice)
    for ranks, flag in re.findall(r"--tp (\d+)(?: -q (\w+))?", advice):
        other = fits(flag or recipe, "cuda", gib)[0]
        assert memory_report_on_largest_rank(other, int(ranks), False)["kv_tokens"]
        assert not memory_report_on_largest_rank(other, int(ranks) // 2, False)["kv_tokens"]
    assert made.engine_type == "language"


def test_a_cpu_needs_more_memory(fits: Any) -> None:
    _, text = fits("none", "cpu", 1)
    advice = re.search(
        r"; no recipe fits; what does: a device of ([\d.]+) GiB or ([\d.]+) GiB with -q int8 or "
        r"([\d.]+) GiB with -q int4$",
        text,
    )
    assert advice is not None
    for recipe, gib in zip(("none", "int8", "int4"), advice.groups(), strict=True):
        assert "does not fit" not in fits(recipe, "cpu", float(gib) + 0.01)[1]
        assert "does not fit" in fits(recipe, "cpu", float(gib) - 0.02)[1]


def test_advice_for_ranks(fits: Any) -> None:
    assert fits("none", "cuda", 2, 2)[1].endswith("; -q int4 fits")
    assert fits("none", "cuda", 1.8, 2)[1].endswith(
        "; no recipe fits; what does: --tp 8 (8 such GPUs) or --tp 4 -q int8 (4 such GPUs)"
    )

"""The plan of a model whose layers all have a window counts the pages inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.memory_plan import memory_report
from modelmill.builder.plan import make_build_plan
from modelmill.core.config import BuildConfig
from tests.models.tiny_models import COMMON

LONG = 1 << 20


@pytest.mark.parametrize("window", [4096, None])
def test_the_longest_sequence_takes_the_pages_of_its_window(
    window: int | None, tmp_path: Path
) -> None:
    raw: dict[str, Any] = {
        **COMMON, "model_type": "mistral", "sliding_window": window,
        "max_position_embeddings": LONG,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = make_build_plan(
        checkpoint_from_config(tmp_path), BuildConfig(dtype="float32", target="cpu")
    )
    report = memory_report(plan)
    in_pages = report["kv_tokens"] // max(report["max_batch_at_max_len"], 1)
    assert (f"the last {window} are kept" in report["fits"]) == (window is not None)
    if window is None:
        assert in_pages >= LONG
    else:
        # all sequences together need the tokens of one step beside their windows
        assert window <= in_pages < 1.5 * window


@pytest.mark.parametrize("length", [1024, 32768])
def test_layers_with_a_window_keep_its_tokens_beside_layers_that_keep_all(
    length: int, tmp_path: Path
) -> None:
    """Gemma 3's layers, one of six with full attention; in short sequences all keep all tokens."""
    raw: dict[str, Any] = {
        **COMMON, "model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": 12,
        "max_position_embeddings": LONG, "head_dim": 12,
    }  # fmt: skip
    raw = {key: value for key, value in raw.items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    build = BuildConfig(dtype="float32", target="cpu", max_model_len=length)
    plan = make_build_plan(checkpoint_from_config(tmp_path), build)
    report = memory_report(plan)
    groups, per_token = report["kv_page_groups"], report["kv_per_token"]
    if length <= 1024:
        assert groups == []
        assert "in any mixture" in report["fits"]
        return
    assert sum(group["layers"] for group in groups) == 12
    assert {group["window"] for group in groups} == {None, 1024}
    per_sequence = sum(group["bytes_per_sequence"] for group in groups)
    layer_tokens = 2 * length + 10 * 1024  # of one layer, in 12
    assert layer_tokens <= 12 * per_sequence / per_token <= 1.05 * layer_tokens
    assert "tokens in short sequences" in report["fits"]
    room = report["kv_tokens"] * per_token
    assert report["max_batch_at_max_len"] == pytest.approx(room / per_sequence, rel=0.05)

"""The plan of a model whose layers all have a window counts the pages inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.config_only import checkpoint_of_config
from modelmill.builder.memory_plan import STEP_TOKENS, memory_report
from modelmill.builder.plan import make_plan
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
    plan = make_plan(checkpoint_of_config(tmp_path), BuildConfig(dtype="float32", target="cpu"))
    report = memory_report(plan)
    in_pages = report["kv_tokens"] // max(report["max_batch_at_max_len"], 1)
    assert (f"the last {window} are kept" in report["fits"]) == (window is not None)
    if window is None:
        assert in_pages >= LONG
    else:
        assert window + STEP_TOKENS <= in_pages < 2 * (window + STEP_TOKENS)

"""Files from before transformers had Falcon's class: the same model as under today's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from tests.models.all_families import CASES

pytest.importorskip("transformers")

FLOAT = BuildConfig(dtype="float32", target="cpu")
OLD_KEYS = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
# Falcon 7B and 40B as in 2023, and the switches that their old names implied
IMPLIED_SWITCHES: dict[str, dict[str, Any]] = {
    "RefinedWebModel": {"new_decoder_architecture": False, "multi_query": True},
    "RefinedWeb": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def old_config(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The config under the names of 2023."""
    old = {OLD_KEYS.get(key, key): value for key, value in raw.items()}
    if "num_kv_heads" in old:
        old["n_head_kv"] = old.pop("num_kv_heads")
    del old["new_decoder_architecture"]
    return {**old, "model_type": name, "architectures": ["RWForCausalLM"]}


@pytest.mark.parametrize("name", IMPLIED_SWITCHES)
def test_it_is_the_model_of_todays_names(name: str, tmp_path: Path) -> None:
    today = tmp_path / "today"
    changes = {"ffn_hidden_size": None, "num_kv_heads": None, **IMPLIED_SWITCHES[name]}
    CASES["falcon"].save(today, **changes)
    expected = make_build_plan(open_checkpoint(today), FLOAT)
    old = old_config(CASES["falcon"].raw(**changes), name)
    (today / "config.json").write_text(json.dumps(old))
    plan = make_build_plan(open_checkpoint(today), FLOAT)
    assert plan.model_config == expected.model_config
    assert plan.tensors == expected.tensors
    only = tmp_path / "config"
    only.mkdir()
    (only / "config.json").write_text(json.dumps(old))
    assert make_build_plan(checkpoint_from_config(only), FLOAT).model_config == plan.model_config

"""A checkpoint's config.json is written by strangers: whatever stands in it is a plan, or one error
line at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError
from modelmill.core.module_lookup import import_module_if_exists
from tests.checkpoint.checkpoint_factory import LLAMA_CONFIG, llama_state, write_folder
from tests.trust.error_lines import check_one_line
from tests.wait import time_limit

HOSTILE: list[Any] = [
    10**400, 2**31 - 1, 2**40, -1, 0, 1.5, 1e308, float("nan"), float("inf"), "8", "", "a\nb",
    "\ud800",
    [], [1], [[[]]], {}, {"a": 1}, True, False, None,
]  # fmt: skip
OPTIONAL = ("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "max_window_layers",
            "use_sliding_window", "quantization_config", "torch_dtype", "architectures",
            "hidden_act",
            "attention_bias", "mlp_bias")  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 20,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
}
QWEN = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 96,
        "vocab_size": 20, "seq_length": 64, "layer_norm_epsilon": 1e-6, "kv_channels": 8,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000, "use_dynamic_ntk": True, "use_logn_attn": True,
        "no_bias": True}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("config") / "hf", llama_state())


def one_line_or_a_plan(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with time_limit():
        try:
            json.dumps(
                make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu")).describe()
            )
        except CheckpointError as error:
            check_one_line(error)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", [*LLAMA_CONFIG, *OPTIONAL])
def test_any_value_of_any_key(folder: Path, family: str, key: str) -> None:
    for value in HOSTILE:
        one_line_or_a_plan(folder, {**LLAMA_CONFIG, "model_type": family, key: value})


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_any_value_in_a_rope_scaling(folder: Path, rope_type: str) -> None:
    for key in SCALINGS[rope_type]:
        for value in HOSTILE:
            one_line_or_a_plan(
                folder,
                {
                    **LLAMA_CONFIG,
                    "rope_scaling": {"rope_type": rope_type, **SCALINGS[rope_type], key: value},
                },
            )


@pytest.mark.parametrize(("family", "good"), [("gpt2", GPT2), ("qwen", QWEN)])
def test_any_value_of_the_older_families_keys(family: str, good: dict[str, Any]) -> None:
    config_from_hf = import_module_if_exists("modelmill.models", family).config_from_hf  # type: ignore[union-attr]
    config_from_hf(good)
    for key in good:
        for value in HOSTILE:
            try:
                sizes = config_from_hf({**good, key: value})
            except CheckpointError as error:
                check_one_line(error)
            else:
                assert sizes.layers <= 4096


def test_senseless_numbers_are_named_with_their_key(folder: Path) -> None:
    for key, value in [
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("num_hidden_layers", 2**31 - 1),
    ]:
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, key: value}))
        with pytest.raises(CheckpointError, match=key):
            make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"model_type": "llama",', "\x00", ""]
)
def test_what_is_no_json_object(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path, llama_state())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_a_family_is_a_name_and_never_a_path(folder: Path) -> None:
    for name in (
        "../llama",
        "_raw",
        "os",
        "llama.config_from_hf",
        "llama\n",
        "/etc/passwd",
        "modelmill.models.llama",
    ):
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "model_type": name}))
        with pytest.raises(CheckpointError, match="not known"):
            make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))

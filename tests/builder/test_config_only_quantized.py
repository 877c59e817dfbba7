"""Plans of a config.json that describes quantized weights: as with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError
from tests.checkpoint import packed_writers as writers
from tests.checkpoint.test_prequantized import ct, ct_int8_channels
from tests.quant.test_keep import foreign, gptq

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
SIZES = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 96,
}  # fmt: skip


def awq(shape: tuple[int, int], seed: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    drawn = writers.seeded_matrix(*shape, 32, seed=seed)
    return writers.awq_tensors(drawn), drawn.weight


def compressed(bits: int, group: int, *, symmetric: bool, pack: bool = True) -> Any:
    def make(shape: tuple[int, int], seed: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        drawn = writers.seeded_matrix(
            *shape, group, bits=bits, symmetric=symmetric, dtype=torch.bfloat16, seed=seed
        )
        return writers.compressed_tensors(drawn, bits, symmetric=symmetric, pack=pack), drawn.weight

    return make


METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "GPTQ, 4 bits": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        gptq(4, symmetric=False),
    ),
    "GPTQ, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True},
        gptq(8, symmetric=True),
    ),
    "compressed-tensors, 4 bits": (
        ct(4, strategy="group", group=32, symmetric=True, ct_format="pack-quantized"),
        compressed(4, 32, symmetric=True),
    ),
    "compressed-tensors with offsets": (
        ct(4, strategy="group", group=32, symmetric=False, ct_format="pack-quantized"),
        compressed(4, 32, symmetric=False),
    ),
    "compressed-tensors, 8 bits": (
        ct_int8_channels(True, {"num_bits": 8, "dynamic": True, "strategy": "token"}),
        compressed(8, -1, symmetric=True, pack=False),
    ),
}


def save_config(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def sizes(plan: BuildPlan) -> dict[str, tuple[str | None, int]]:
    """Format and bytes of each tensor."""
    return {each.rule.target: (each.weight_format, each.nbytes) for each in plan.tensors}


@pytest.mark.parametrize("method", METHODS)
def test_integers_are_planned_as_they_are_kept(method: str, tmp_path: Path) -> None:
    settings, make = METHODS[method]
    weights, _ = foreign(tmp_path / "hf", settings, make)
    raw = json.loads((weights / "config.json").read_text())
    only = save_config(tmp_path / "config", raw)
    config = BuildConfig(dtype="float32", target="cpu")
    planned = make_build_plan(checkpoint_from_config(only), config)
    assert planned.config.quantization == "keep"
    assert sizes(planned) == sizes(make_build_plan(open_checkpoint(weights), config))


def test_modules_that_compressed_tensors_leaves_out_are_dense(tmp_path: Path) -> None:
    settings = ct(4, strategy="group", group=32, symmetric=True, ct_format="pack-quantized")
    left_out = ["lm_head", "model.layers.1.mlp.down_proj", r"re:.*o_proj$"]
    raw = {**SIZES, "quantization_config": {**settings, "ignore": left_out}}
    view = checkpoint_from_config(save_config(tmp_path / "config", raw))
    dense = {
        name
        for name in view.names()
        if name.endswith("_proj.weight") and view.quant_layout(name) is None
    }
    attention = "model.layers.{}.self_attn.o_proj.weight"
    assert dense == {
        "model.layers.1.mlp.down_proj.weight", attention.format(0), attention.format(1)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        ("lm_head", "must be a list of names"),
        ([5], "must be a list of names"),
        (["re:("], "no regular expression"),
        (["re:(a|a)*$"], "too complex"),
        (["re:.*.*.*.*.*x"], "too complex"),
    ],
)
def test_names_that_cannot_be_read_are_one_line(ignore: Any, words: str, tmp_path: Path) -> None:
    settings = ct(4, strategy="group", group=32, symmetric=True, ct_format="pack-quantized")
    raw = {**SIZES, "quantization_config": {**settings, "ignore": ignore}}
    with pytest.raises(CheckpointError, match=words):
        checkpoint_from_config(save_config(tmp_path / "config", raw))


def test_8_bit_floats_are_planned_as_they_are_expanded(tmp_path: Path) -> None:
    config = BuildConfig(dtype="bfloat16", target="cpu")
    plain = make_build_plan(checkpoint_from_config(save_config(tmp_path / "plain", SIZES)), config)
    left = {**BLOCKS, "modules_to_not_convert": ["o_proj"]}
    raw = {**SIZES, "quantization_config": left}
    checkpoint = checkpoint_from_config(save_config(tmp_path / "fp8", raw))
    names = checkpoint.names()
    shown = {name: checkpoint.tensor_info(name).dtype for name in names}
    assert shown["model.layers.1.mlp.up_proj.weight"] == "scaled e4m3"
    assert shown["model.layers.1.self_attn.o_proj.weight"] == "bfloat16"
    assert not any("scale" in name for name in names)
    planned = make_build_plan(checkpoint, config)
    assert sizes(planned) == sizes(plain)
    assert any("8-bit floats are expanded" in line for line in planned.warnings)
    smaller = make_build_plan(
        checkpoint, BuildConfig(dtype="bfloat16", target="cpu", quantization="int8")
    )
    assert smaller.weight_bytes < planned.weight_bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantized by bitsandbytes"),
        ("gptq", "quantization_config in config.json is no object"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
                "format": "pack-quantized",
            },
            "do not follow from config.json alone",
        ),
    ],
)
def test_other_methods_are_one_line(settings: Any, words: str, tmp_path: Path) -> None:
    folder = save_config(tmp_path / "config", {**SIZES, "quantization_config": settings})
    with pytest.raises(CheckpointError, match=words) as error:
        checkpoint_from_config(folder)
    assert "\n" not in str(error.value)

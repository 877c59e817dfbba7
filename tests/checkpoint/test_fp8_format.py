"""Checkpoints in 8-bit floats: the values that transformers reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept.reference.dequantize import DequantizedContainer, _e4m3_value_table
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from modelmill.llm import build_engine

NAME = "model.layers.0.mlp.down_proj.weight"
STEM = NAME.removesuffix(".weight")
FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}


def compressed(**weights: Any) -> dict[str, Any]:
    """Settings as llm-compressor writes them."""
    group = {"weights": {"num_bits": 8, "type": "float", **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, settings: Any, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(folder)


STORED: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "blocks": (BLOCKS, "weight_scale_inv", (3, 3)),
    "one scale": ({"quant_method": "fp8"}, "weight_scale", ()),
    "one scale of one entry": ({"quant_method": "fp8"}, "weight_scale_inv", (1,)),
    "rows": ({"quant_method": "fbgemm_fp8"}, "weight_scale", (40, 1)),
    "compressed rows": (compressed(strategy="channel"), "weight_scale", (40, 1)),
    "compressed tensor": (compressed(strategy="tensor"), "weight_scale", (1,)),
    "compressed blocks": (
        compressed(strategy="block", block_structure=[16, 32]), "weight_scale", (3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_values_by_our_reader_and_by_the_reference(
    tmp_path: Path, stored: str, scale_dtype: torch.dtype
) -> None:
    settings, suffix, shape = STORED[stored]
    codes = drawn(40, 70).to(FP8)
    scale = drawn(*shape, seed=1).abs().to(scale_dtype) + 0.1
    tensors = {NAME: codes, f"{STEM}.{suffix}": scale, "model.norm.weight": torch.ones(40)}
    tensors[f"{STEM}.input_scale"] = torch.ones(1)
    checkpoint = write(tmp_path, settings, tensors)
    spread = scale.double()
    if shape == (3, 3):
        rows, columns = torch.arange(40) // 16, torch.arange(70) // 32
        spread = spread[rows][:, columns]
    expected = codes.double() * spread
    assert set(checkpoint.names()) == {NAME, "model.norm.weight"}
    assert checkpoint.get(NAME).dtype is torch.float32
    torch.testing.assert_close(checkpoint.get(NAME).double(), expected, rtol=1e-7, atol=0)
    reference = DequantizedContainer(checkpoint.raw_container, checkpoint.config)
    assert set(reference.names()) == set(checkpoint.names())
    assert torch.equal(reference.get(NAME), expected)


def test_all_256_values_of_the_reference() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(FP8).double()
    torch.testing.assert_close(
        torch.from_numpy(_e4m3_value_table()), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("settings", "scales", "error", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, {}, CheckpointError, "format 'e5m2'"),
        ({**BLOCKS, "weight_block_size": [16]}, {}, CheckpointError, r"blocks of \[16\]"),
        ({**BLOCKS, "weight_block_size": [16, 0]}, {}, CheckpointError, r"blocks of \[16, 0\]"),
        (BLOCKS, {}, CheckpointError, "with 0 scales"),
        (
            BLOCKS,
            {"weight_scale_inv": (3, 3), "weight_scale": (1,)},
            CheckpointError,
            "with 2 scales",
        ),
        (BLOCKS, {"weight_scale_inv": (3, 2)}, CorruptCheckpoint, "does not fit"),
        ({"quant_method": "fp8"}, {"weight_scale": (3, 3)}, CorruptCheckpoint, "does not fit"),
        (compressed(num_bits=4), {"weight_scale": (40, 1)}, CheckpointError, "4-bit"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path,
    settings: dict[str, Any],
    scales: dict[str, tuple[int, ...]],
    error: type[Exception],
    message: str,
) -> None:
    tensors = {NAME: drawn(40, 70).to(FP8)}
    tensors |= {f"{STEM}.{name}": torch.ones(shape) for name, shape in scales.items()}
    with pytest.raises(error, match=message):
        write(tmp_path, settings, tensors)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 as its FP8 release is stored: scales for blocks of every linear layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3-fp8")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 160}
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(3)
    tensors = {}
    for name, value in Qwen3ForCausalLM(config).state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value.clone()
            continue
        rows, columns = -(-value.shape[0] // 32), -(-value.shape[1] // 32)
        scale = drawn(rows, columns, seed=len(tensors)).abs() * 1e-3 + 5e-4
        spread = scale.repeat_interleave(32, 0)[: len(value)].repeat_interleave(32, 1)
        tensors[name] = (value / spread[:, : value.shape[1]]).to(FP8)
        tensors[f"{name}_scale_inv"] = scale
    config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "fmt": "e4m3", "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logits_are_those_of_transformers(quantized: Path, tmp_path: Path) -> None:
    """Its whole loader of such checkpoints needs accelerate; the arithmetic is this function's."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
    from modelmill.runtime.engine_core import EngineCore

    stored = load_file(quantized / "model.safetensors")
    tensors = {
        name: _dequantize_fp8_weight(value, stored[f"{name}_scale_inv"], [32, 32], torch.float32)
        if value.dtype is FP8
        else value
        for name, value in stored.items()
        if not name.endswith("_scale_inv")
    }
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(quantized)).float()
    model.load_state_dict(tensors)
    ids = torch.randint(0, 160, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[0]
    build_engine(quantized, tmp_path / "engine", BuildConfig(dtype="float32", target="cpu"))
    logits = TeacherForcedScorer(EngineCore.open(tmp_path / "engine")).compute_logits(
        [ids[0].tolist()]
    )[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_a_recipe_takes_it_as_any_checkpoint(quantized: Path, tmp_path: Path, recipe: str) -> None:
    config = BuildConfig(dtype="float32", target="cpu", quantization=recipe, method="nearest")
    acceptance = build_engine(quantized, tmp_path / "engine", config)
    assert acceptance["accepted"]


def test_keeping_is_refused_with_advice(quantized: Path, tmp_path: Path) -> None:
    config = BuildConfig(dtype="float32", target="cpu", quantization="keep")
    with pytest.raises(UsageError, match=r"8-bit floats, which are expanded .* -q fp8"):
        build_engine(quantized, tmp_path / "engine", config)


def test_without_a_recipe_it_is_expanded_and_told(quantized: Path) -> None:
    plan = make_build_plan(open_checkpoint(quantized), BuildConfig(dtype="bfloat16", target="cpu"))
    assert plan.config.quantization == "none"
    assert any("8-bit floats are expanded" in warning for warning in plan.warnings)

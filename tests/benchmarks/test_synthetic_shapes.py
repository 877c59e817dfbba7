"""The shapes as peers read them, and their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.make_checkpoint import UNIFORM, UNIFORM_RANGE, fill
from benchmarks.model_shapes import SHAPES, tensors, with_num_layers
from benchmarks.synthetic_shapes import (
    SMALLEST_MATRIX,
    VLLM_FORMATS,
    randomize_weights,
    synthetic_config,
    vllm_quantization,
    write_synthetic_config,
)
from benchmarks.weight_formats import WEIGHT_FORMATS

WEIGHT_BITS = {"int4": 4, "int8": 8, "smoothquant": 8}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_peer_has_as_many_weights_as_we_have(shape: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = with_num_layers(shape, 1)
    config = json.loads((write_synthetic_config(raw, tmp_path) / "config.json").read_text())
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    num_weights = sum(torch.Size(size).numel() for shard in tensors(raw) for size in shard.values())
    assert sum(weight.numel() for weight in reference.parameters()) == num_weights


def test_qwen_is_converted_to_qwen2() -> None:
    config = synthetic_config(SHAPES["qwen-7b"])
    assert (config["model_type"], config["intermediate_size"], config["num_key_value_heads"]) == (
        "qwen2",
        11008,
        32,
    )
    assert synthetic_config(SHAPES["llama-7b"]) == SHAPES["llama-7b"]


def test_fewer_layers_leave_the_shape_alone() -> None:
    assert with_num_layers("gpt2-medium", 2)["n_layer"] == 2
    assert with_num_layers("qwen-7b", 3)["num_hidden_layers"] == 3
    assert SHAPES["qwen-7b"]["num_hidden_layers"] == 32


def test_uniform_weights_are_within_a_thousandth_whatever_they_are_for() -> None:
    for name, size in (
        ("norm.weight", (999,)),
        ("embed.weight", (99, 99)),
        ("up.weight", (40, 300)),
    ):
        drawn = fill(name, size, torch.bfloat16, torch.Generator().manual_seed(1), UNIFORM).float()
        assert drawn.abs().max().item() == pytest.approx(UNIFORM_RANGE, rel=0.02)
        assert drawn.mean().abs().item() < 0.1 * UNIFORM_RANGE


def test_weights_are_drawn_with_the_spread_of_our_checkpoints() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(300, 64), "norm": nn.LayerNorm(4096), "up": nn.Linear(400, 300)}
    )
    assert randomize_weights(model) == 5
    assert model["embed"].weight.std().item() == pytest.approx(1.0, rel=0.1)  # type: ignore[union-attr, operator]
    assert model["up"].weight.std().item() == pytest.approx(400**-0.5, rel=0.1)  # type: ignore[union-attr, operator]
    assert model["norm"].weight.mean().item() == pytest.approx(1.0, rel=0.05)  # type: ignore[union-attr, operator]
    assert model["norm"].bias.std().item() == pytest.approx(0.1, rel=0.2)  # type: ignore[union-attr, operator]
    assert all((weight != 0).all() for weight in model.parameters())
    randomize_weights(model, "uniform")
    every = torch.cat([weight.flatten() for weight in model.parameters()])
    assert every.abs().max().item() == pytest.approx(UNIFORM_RANGE, rel=0.01)
    assert every.std().item() == pytest.approx(UNIFORM_RANGE / 3**0.5, rel=0.02)
    again = nn.Linear(400, 300)
    randomize_weights(again)
    first = again.weight.clone()
    randomize_weights(again)
    assert torch.equal(first, again.weight), "the same seed gives the same weights"


@pytest.mark.parametrize("transposed", [True, False])
def test_a_matrix_of_gpt2_has_the_spread_of_its_inputs_however_it_lies(transposed: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc = Conv1D(400, 100) if transposed else nn.Linear(100, 400)

    model = nn.ModuleDict({"transformer": nn.ModuleDict({"h": nn.ModuleList([Layer()])})})
    randomize_weights(model)
    weight = model.get_parameter("transformer.h.0.c_fc.weight")
    assert weight.std().item() == pytest.approx(100**-0.5, rel=0.05)


def test_codes_and_scales_of_quantized_matrices_are_drawn() -> None:
    def parameter(tensor: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=False)

    model = nn.ParameterDict(
        {
            "packed": parameter(torch.zeros(256, 256, dtype=torch.int32)),
            "codes": parameter(torch.zeros(256, 256, dtype=torch.int8)),
            "shape": parameter(torch.tensor([256, 2048])),
            "weight": parameter(torch.zeros(64, 128).to(torch.float8_e4m3fn)),
            "weight_scale": parameter(torch.zeros(256, 2)),
        }
    )
    assert randomize_weights(model) == 5
    assert model["packed"].numel() == SMALLEST_MATRIX
    assert model["packed"].unique().numel() > 65000
    assert model["codes"].unique().numel() >= 255
    assert model["shape"].tolist() == [256, 2048]
    assert model["weight"].float().std().item() == pytest.approx(16, rel=0.1)
    assert 5e-4 <= model["weight_scale"].min() < model["weight_scale"].max() <= 15e-4


@pytest.mark.parametrize("weight_format", sorted(VLLM_FORMATS))
def test_compressed_tensors_reads_the_quantization_of_a_peer(weight_format: str) -> None:
    assert weight_format in WEIGHT_FORMATS
    config = vllm_quantization(weight_format)
    group = config["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == WEIGHT_BITS[weight_format]
    quantizes_inputs = group["input_activations"] is not None
    assert quantizes_inputs == (config["format"] == "int-quantized")
    assert config["ignore"] == ["lm_head"]

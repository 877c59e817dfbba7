"""Builds of smoothquant and fp8: sizes as planned, bit-identical, resumable; what is stored says
what was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.store import Artifact, open_artifact
from modelmill.builder.plan import BuildPlan
from modelmill.core.config import RunConfig
from modelmill.loader.model_loader import load_model
from modelmill.nn.whole_model_decode import CachedDecoderWeights
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import save_tiny
from tests.builder.test_build_engine import digest
from tests.builder.test_quantized_builds import (
    goes_on_after_two_layers,
    make,
    plan,
    two_builds_are_equal,
)

SMOOTH = {"quantization": "smoothquant", "alpha": "0.5"}
OPTION_SETS: list[dict[str, Any]] = [
    SMOOTH,
    SMOOTH | {"activation_scales": "tensor", "weight_scales": "tensor"},
    {"quantization": "fp8"},
    {"quantization": "fp8", "method": "nearest"},
    {"quantization": "fp8", "activation_scales": "tensor"},
    {
        "quantization": "fp8",
        "activation_scales": "none",
        "weight_scales": "tensor",
        "quantize_head": True,
    },
]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "hf")


def layer_linears(artifact: Artifact) -> Iterator[tuple[str, Any]]:
    """The linear layers of each layer of the loaded engine, by name."""
    for layer in load_model(artifact, "cpu").layers:  # type: ignore[union-attr]
        yield "qkv_proj", layer.attn.qkv_proj
        yield "o_proj", layer.attn.o_proj
        yield "gate_up_proj", layer.mlp.gate_up_proj
        yield "down_proj", layer.mlp.down_proj


@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_the_engine_is_as_large_as_planned_and_says_what_it_is(
    llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    build_plan = plan(llama, **options)
    assert (build_plan.calibration is None) == (options.get("method") == "nearest")
    artifact = open_artifact(make(llama, tmp_path / "e", **options))
    stored = {name: artifact.tensor(name) for name in artifact.names()}
    assert sum(t.nbytes for t in stored.values()) == build_plan.weight_bytes
    weight_format = "fp8" if options["quantization"] == "fp8" else "w8a8"
    assert set(artifact.manifest.weight_formats.values()) == {weight_format} | (
        set() if "quantize_head" in options else {"dense"}
    )
    for _, linear in layer_linears(artifact):
        weight = linear.weight
        assert (weight.inv_input_scale is not None) == (
            options.get("activation_scales") == "tensor"
        )
        assert weight.float_input == (options.get("activation_scales") == "none")
        assert (len(set(weight.scale.tolist())) == 1) == (options.get("weight_scales") == "tensor")


@pytest.mark.parametrize(
    "options",
    [
        {"splits_per_channel": 2},
        {},
        {"bits": "w4a8"},
        {"bits": "w4a4"},
        {"bits": "w4a8", "splits_per_channel": 1},
        {"bits": "w4a8", "mode": "dynamic"},
    ],
    ids=str,
)
def test_clusters_are_as_large_as_planned_and_heavy_inputs_alone_have_copies(
    llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"quantization": "rptq", "dtype": "float32", **options}
    artifact = open_artifact(make(llama, tmp_path / "e", **options))
    assert (
        sum(artifact.tensor(name).nbytes for name in artifact.names())
        == plan(llama, **options).weight_bytes
    )
    usual = (
        {"w8a8": 1, "w4a8": 2, "w4a4": 3}[options.get("bits", "w8a8")]
        if "mode" not in options
        else 1
    )
    num_splits = options.get("splits_per_channel", usual)
    assert artifact.manifest.build["splits_per_channel"] == num_splits
    for name, linear in layer_linears(artifact):
        order = linear.weight.perm
        copies = num_splits if name == "down_proj" else 1
        assert order[order >= 0].bincount().tolist() == [copies] * linear.weight.columns


@pytest.mark.parametrize("mode", ["exact", "folded", "dynamic"])
@pytest.mark.parametrize("bits", ["w8a8", "w4a8"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_head_in_integers_scales_its_inputs_as_they_come(
    family: str, bits: str, mode: str, tmp_path: Path
) -> None:
    """Nothing is known before of what the head will read, whatever the layers' mode is."""
    options = {
        "quantization": "rptq",
        "bits": bits,
        "mode": mode,
        "dtype": "float32",
        "quantize_head": True,
    }
    folder = save_tiny(family, tmp_path / "hf")
    artifact = open_artifact(make(folder, tmp_path / "e", **options))
    assert artifact.manifest.weight_formats["head"] == "rptq"
    assert (
        sum(artifact.tensor(name).nbytes for name in artifact.names())
        == plan(folder, **options).weight_bytes
    )
    head = load_model(artifact, "cpu").head.weight  # type: ignore[union-attr]
    assert head.inv_input_scales is None
    unscaled = open_artifact(make(folder, tmp_path / "w", dtype="float32"))
    weight = unscaled.tensor("head.weight" if "head.weight" in unscaled.names() else "embed.weight")
    step = weight.abs().amax(1) / (127 if bits == "w8a8" else 7)
    assert (
        bool(((head.dequantize() - weight).abs() <= 0.51 * step[:, None] + 1e-6).all())
        or bits == "w4a8"
    )


def test_two_builds_are_bit_identical(llama: Path, tmp_path: Path) -> None:
    two_builds_are_equal(llama, tmp_path, quantization="smoothquant", dtype="bfloat16")


@pytest.mark.parametrize("family", ["llama-bias", "gpt2"])
def test_an_interrupted_smoothing_goes_on_where_it_was(
    family: str, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = save_tiny(family, tmp_path / "hf")
    goes_on_after_two_layers(folder, tmp_path, monkeypatch, **SMOOTH, dtype="bfloat16")


def test_int8_with_rounded_inputs_is_not_taken_for_int8_alone(llama: Path, tmp_path: Path) -> None:
    """The CPU's op for whole decode steps reads {weight, scale}: it would leave the rounding
    out.
    """
    engine = make(llama, tmp_path / "e", **SMOOTH)
    model = load_model(open_artifact(engine), "cpu")
    assert CachedDecoderWeights(model.layers, model.norm, model.head).stack() is None  # type: ignore[arg-type]
    loop = EngineCore.open(engine, RunConfig(kv_cache_bytes=1 << 20))
    assert loop.artifact is not None
    assert all(
        bool(torch.isfinite(t.float()).all())
        for t in map(loop.artifact.tensor, loop.artifact.names())
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "method": "nearest", "group_size": 32},
        {"quantization": "int4", "method": "nearest", "group_size": -1, "symmetric": True},
        {"quantization": "fp8", "method": "nearest"},
        {
            "quantization": "fp8",
            "method": "nearest",
            "weight_scales": "tensor",
            "quantize_head": True,
        },
    ],
    ids=str,
)
def test_rounding_to_nearest_gives_the_same_bits_on_a_gpu(
    llama: Path, tmp_path: Path, monkeypatch: Any, options: dict[str, Any], dtype: str
) -> None:
    there = digest(make(llama, tmp_path / "a", target="cuda", dtype=dtype, **options))
    monkeypatch.setattr(BuildPlan, "device", "cpu")
    assert there == digest(make(llama, tmp_path / "b", target="cuda", dtype=dtype, **options))

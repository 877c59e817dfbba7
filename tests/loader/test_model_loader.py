"""Filling a model: everything in its place, sharing kept, and what does not belong is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.loader.capacity import weight_bytes
from modelmill.loader.model_loader import build_model, fill_weights, load_model
from modelmill.nn.decoder import Decoder
from modelmill.weights import base
from tests.runtime import tiny

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def parts(**changes) -> tuple[Decoder, dict[str, torch.Tensor]]:
    model = build_model("llama", CONFIG)
    return model, {**tiny.random_tensors(model), **changes}


def test_zero_copy_and_shared() -> None:
    model, tensors = parts()
    del tensors["head.weight"]
    fill_weights(model, tensors.__getitem__, tensors, {}, {"head.weight": "embed.weight"}, "cpu")
    assert model.head.weight.weight.data_ptr() == model.embed.weight.data_ptr()
    assert model.embed.weight.data_ptr() == tensors["embed.weight"].data_ptr()
    assert not any(b.is_meta for b in model.buffers())
    assert (
        weight_bytes(model)
        == sum(t.nbytes for t in tensors.values()) + model.rotary.inv_freq.nbytes
    )


def test_held_kinds_and_one_tensor_at_a_time() -> None:
    model, tensors = parts()
    name = "layers.0.mlp.down_proj"
    packed = base.pack_as_format("int8", tensors.pop(f"{name}.weight"), torch.float32)
    tensors |= {f"{name}.{s}": t for s, t in packed.tensors().items()}
    requested: list[str] = []

    def get(name: str) -> torch.Tensor:
        requested.append(name)
        return tensors[name]

    fill_weights(model, get, tensors, {name: "int8"}, {}, "cpu")
    assert sorted(requested) == sorted(tensors)
    assert model.get_submodule(name).weight.format == "int8"
    with pytest.raises(CorruptArtifact, match=r"lacks the tensor layers\.0\.mlp\.down_proj\.scale"):
        fill_weights(
            build_model("llama", CONFIG),
            get,
            set(tensors) - {f"{name}.scale"},
            {name: "int8"},
            {},
            "cpu",
        )


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.attn.o_proj.weight", "norm.weight"])
def test_missing_left_over_and_misshapen_are_named(name: str) -> None:
    model, tensors = parts()
    missing = {k: v for k, v in tensors.items() if k != name}
    with pytest.raises(CorruptArtifact, match=name):
        fill_weights(model, tensors.__getitem__, missing, {}, {}, "cpu")
    model, tensors = parts(**{"layers.7.attn.o_proj.weight": torch.zeros(1)})
    with pytest.raises(CorruptArtifact, match=r"layers\.7\.attn\.o_proj\.weight"):
        fill_weights(model, tensors.__getitem__, tensors, {}, {}, "cpu")
    model, tensors = parts(**{name: torch.zeros(3, 5)})
    with pytest.raises(CorruptArtifact, match="shape"):
        fill_weights(model, tensors.__getitem__, tensors, {}, {}, "cpu")


def test_load_reads_the_manifest() -> None:
    _, tensors = parts()
    manifest = SimpleNamespace(
        model_type="llama", config=CONFIG, weight_formats={}, aliases={}, build={"dtype": "float32"}
    )
    artifact = SimpleNamespace(
        manifest=manifest, tensor=tensors.__getitem__, names=lambda: list(tensors), path="e"
    )
    model = load_model(artifact, "cpu")  # type: ignore[arg-type]
    assert model.embed.weight.shape == (61, 32)
    manifest.model_type = "lama"
    with pytest.raises(IncompatibleArtifact, match="lama"):
        load_model(artifact, "cpu")  # type: ignore[arg-type]

"""EVA tower and Q-Former against transformers' BLIP-2 parts, seeded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.checkpoint.blip2 import Blip2AsMiniGpt4Container, convert_blip2_config
from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.rename import apply_rule, plan_renames
from modelmill.loader.model_loader import fill_weights
from modelmill.models import _blip2_vision, minigpt4
from modelmill.models._blip2_vision import Blip2ImageEmbedder, Blip2VisionSpec
from modelmill.models._eva_vit import interpolate_positions
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends

RAW: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 56, "patch_size": 14, "layer_norm_eps": 1e-6,
    },
    "qformer_config": {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 56,
        "encoder_hidden_size": 48, "cross_attention_frequency": 2, "layer_norm_eps": 1e-12,
    },
    "text_config": {"hidden_size": 40},
    "num_query_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def hf_modules() -> dict[str, torch.nn.Module]:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    vision = transformers.Blip2VisionModel(
        transformers.Blip2VisionConfig(**RAW["vision_config"])
    ).eval()
    qformer = transformers.Blip2QFormerModel(
        transformers.Blip2QFormerConfig(**RAW["qformer_config"])
    ).eval()
    projection = torch.nn.Linear(32, 40)
    for part in (vision, qformer, projection):
        for name, parameter in part.named_parameters():
            parameter.data.normal_(
                0, 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5, generator=generator
            )
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.data.add_(1)
    for layer in vision.encoder.layers:
        # as a file may have it; it changes nothing
        layer.self_attn.qkv.bias.data[48:96] = 0.5
    return {"vision_model": vision, "qformer": qformer, "language_projection": projection}


def state(hf_modules: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    tensors = {
        f"{part}.{name}": t
        for part, model in hf_modules.items()
        for name, t in model.state_dict().items()
    }
    return tensors | {
        "query_tokens": torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    }


class Memory:
    """A container of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.metadata = tensors, dict[str, Any]()

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo(
            name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes
        )

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def files(self) -> list[Path]:
        return [Path("memory")]


def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' tensors under the names of the original files."""
    parts = Blip2AsMiniGpt4Container(Memory(tensors))
    for name in parts.names():
        assert parts.get(name).shape == parts.tensor_info(name).shape
    return {name: parts.get(name) for name in parts.names()}


def spec_of(raw: dict[str, Any]) -> Blip2VisionSpec:
    text = {
        "model_type": "llama",
        "hidden_size": 40,
        "vocab_size": 9,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    text |= {"intermediate_size": 8, "max_position_embeddings": 32, "rms_norm_eps": 1e-6}
    raw_config, *_ = convert_blip2_config({**raw, "text_config": text}, Path("here"))
    return minigpt4.config_from_hf(raw_config).image_embedder


def test_sizes_that_a_config_leaves_out_are_the_published_ones() -> None:
    text = {
        "model_type": "minigpt4",
        "hidden_size": 40,
        "vocab_size": 9,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
    }
    parts = {"vision_encoder": {"depth": 3}, "qformer": {}}
    spec = minigpt4.config_from_hf({**text, "image_embedder": parts}).image_embedder
    encoder, qformer = spec.vision_encoder, spec.qformer
    assert (encoder.width, encoder.depth, encoder.heads, encoder.inner) == (1408, 3, 16, 6144)
    assert (qformer.width, qformer.depth, qformer.heads, qformer.inner) == (768, 12, 12, 3072)


def make_embedder(spec: Blip2VisionSpec, tensors: dict[str, torch.Tensor]) -> Blip2ImageEmbedder:
    resolved = plan_renames(
        _blip2_vision.rename_rules(spec),
        _blip2_vision.ignored_tensors(spec),
        tensors,
        _blip2_vision.CHECKPOINT_PREFIXES,
    )
    own = {r.target: apply_rule(r, tensors.__getitem__) for r in resolved}
    embedder = Blip2ImageEmbedder(spec)
    fill_weights(embedder, own.__getitem__, own, {}, {}, "cpu")
    return embedder


@torch.inference_mode()
def test_equal_to_transformers(hf_modules) -> None:
    embedder = make_embedder(spec_of(RAW), published(state(hf_modules)))
    images = torch.randn(3, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    vision = VisionContext(select_backends("cpu"))
    image_features = hf_modules["vision_model"](images).last_hidden_state
    queries = state(hf_modules)["query_tokens"].expand(3, -1, -1)
    expected = hf_modules["language_projection"](
        hf_modules["qformer"](
            query_embeds=queries, encoder_hidden_states=image_features
        ).last_hidden_state
    )
    actual = embedder(images, vision)
    assert actual.shape == (3, 8, 40)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@torch.inference_mode()
def test_files_with_more_than_is_used_give_the_same(hf_modules) -> None:
    spec, tensors = spec_of(RAW), published(state(hf_modules))
    # the tower's own file has no prefix, and holds an unused block
    more = {name.removeprefix("visual_encoder."): t for name, t in tensors.items()}
    more["blocks.3.norm1.weight"] = torch.zeros(48)
    more["Qformer.bert.encoder.layer.0.intermediate.dense.weight"] = torch.zeros(3, 3)
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))
    vision = VisionContext(select_backends("cpu"))
    assert torch.equal(
        make_embedder(spec, more)(images, vision), make_embedder(spec, tensors)(images, vision)
    )


def test_positions_for_another_size() -> None:
    table = torch.randn(1, 17, 6)
    assert interpolate_positions(table, 16) is table
    larger = interpolate_positions(table, 36)
    assert larger.shape == (1, 37, 6)
    assert torch.equal(larger[:, 0], table[:, 0])
    square = table[:, 1:].view(1, 4, 4, 6).permute(0, 3, 1, 2)
    expected = (
        torch.nn.functional.interpolate(square, (6, 6), mode="bicubic")
        .permute(0, 2, 3, 1)
        .reshape(1, 36, 6)
    )
    assert torch.allclose(larger[:, 1:], expected)

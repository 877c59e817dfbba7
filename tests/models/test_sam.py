"""SAM against transformers' SamModel (seeded weights, both layouts), and MobileSAM's facts with its
real weights.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from modelmill.checkpoint.rename import apply_rule, plan_renames
from modelmill.core.errors import CheckpointError, TensorMismatch, UnknownArchitecture
from modelmill.loader.model_loader import fill_weights
from modelmill.models import sam
from modelmill.models._sam_vit import resize_rel_pos
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from tests.models.sam_seeded import hf_sam_model

SMALL = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "global_attn_indexes": [1],
    "image_size": 160,
    "patch_size": 16, "mlp_dim": 96, "window_size": 4, "output_channels": 256,
}  # fmt: skip


def make_model(
    state: dict[str, torch.Tensor], raw: dict[str, Any] | None = None, device: str = "cpu"
) -> sam.Model:
    """Our model with the tensors of a checkpoint."""
    raw = raw or sam.config_from_shapes({name: tuple(t.shape) for name, t in state.items()})
    assert raw is not None
    config = sam.config_from_hf(raw)
    model = sam.Model(config)
    resolved = plan_renames(
        sam.rename_rules(config), sam.ignored_tensors(config), state, sam.CHECKPOINT_PREFIXES
    )
    tensors = {r.target: apply_rule(r, state.__getitem__) for r in resolved}
    fill_weights(model, tensors.__getitem__, tensors, {}, {}, device)
    return model


def still() -> VisionContext:
    return VisionContext(select_backends("cpu"))


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return hf_sam_model(SMALL)


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-4) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= bound * expected.abs().max()


@torch.inference_mode()
def test_embedding_equals_transformers(hf_model) -> None:
    model = make_model(hf_model.state_dict(), {"model_type": "sam", "vision_config": SMALL})
    pixels = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(2))
    close(model.encode_image(pixels, still()), hf_model.vision_encoder(pixels)[0])


@torch.inference_mode()
@pytest.mark.parametrize("prompt", ["points", "boxes", "both", "mask"])
def test_masks_equal_transformers(hf_model, prompt: str) -> None:
    model = make_model(hf_model.state_dict(), {"model_type": "sam", "vision_config": SMALL})
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(1, 256, 10, 10, generator=generator)
    points = torch.rand(1, 2, 3, 2, generator=generator) * 150
    labels = torch.tensor([[[1, 0, 1], [1, 1, -1]]])
    boxes = torch.tensor([[[10.0, 20.0, 90.0, 80.0], [0.0, 5.0, 150.0, 140.0]]])
    masks = torch.randn(2, 1, 40, 40, generator=generator) if prompt == "mask" else None
    with_points, with_boxes = prompt in ("points", "both", "mask"), prompt in ("boxes", "both")
    sparse, dense = hf_model.prompt_encoder(
        points if with_points else None,
        labels if with_points else None,
        boxes if with_boxes else None,
        masks[:1] if masks is not None else None,
    )
    expected, scores, *_ = hf_model.mask_decoder(
        image_embeddings=embedding,
        image_positional_embeddings=hf_model.get_image_wide_positional_embeddings(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=True,
    )
    prompt_points, prompt_labels = [], []
    if with_points:
        prompt_points.append(points[0])
        prompt_labels.append(labels[0])
    if with_boxes:
        prompt_points.append(boxes[0].view(2, 2, 2))
        prompt_labels.append(torch.tensor([[2, 3]] * 2))
    elif with_points:
        prompt_points.append(torch.zeros(2, 1, 2))
        prompt_labels.append(torch.full((2, 1), -1))
    mask_prompts = None if masks is None else masks[:1].expand(2, -1, -1, -1)
    actual, own = model.decode_masks(
        embedding, torch.cat(prompt_points, 1), torch.cat(prompt_labels, 1), mask_prompts, still()
    )
    close(actual[:, 1:], expected[0])
    close(own[:, 1:], scores[0])


@torch.inference_mode()
def test_the_original_layout_is_recognised_and_gives_the_same(hf_model) -> None:
    config = sam.config_from_hf({"model_type": "sam", "vision_config": SMALL})
    state = hf_model.state_dict()
    original = {f"{r.target}": state[r.sources[0]] for r in sam.rename_rules(config)}
    raw = sam.config_from_shapes({name: tuple(t.shape) for name, t in original.items()})
    assert raw is not None
    parsed = sam.config_from_hf(raw)
    assert parsed.encoder == config.encoder
    assert parsed.checkpoint_layout == "original"
    pixels = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(4))
    wrapped = {f"module.{name}": t for name, t in original.items()}
    close(make_model(wrapped).encode_image(pixels, still()), hf_model.vision_encoder(pixels)[0])


def test_heads_of_the_published_sizes() -> None:
    for width, depth, heads, global_blocks in (
        (768, 12, 12, (2, 5, 8, 11)),
        (1280, 32, 16, (7, 15, 23, 31)),
    ):
        spec = sam.SamVitSpec(width, depth, heads, global_blocks, 4 * width)
        model = sam.Model(sam.SamConfig(spec))
        shapes = {name: tuple(t.shape) for name, t in model.named_buffers()}
        for name, module in model.named_modules():
            if hasattr(module, "shape"):
                shapes[f"{name}.weight"] = module.shape
        raw = sam.config_from_shapes(shapes)
        assert raw is not None
        assert sam.config_from_hf(raw).encoder == spec


def test_what_is_not_sam() -> None:
    assert sam.config_from_shapes({"model.embed_tokens.weight": (10, 4)}) is None
    with pytest.raises(UnknownArchitecture, match="vision_config"):
        sam.config_from_hf({"model_type": "sam"})


DEFAULTS = {
    "vision_config": {"hidden_act": "gelu", "use_rel_pos": True, "layer_norm_eps": 1e-6},
    "prompt_encoder_config": {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": 160},
    "mask_decoder_config": {"hidden_act": "relu", "num_attention_heads": 8, "layer_norm_eps": 1e-6},
}


def changed(part: str, key: str, value: object) -> dict[str, Any]:
    """transformers' config.json with one value of one part changed."""
    raw = {name: dict(table) for name, table in DEFAULTS.items()}
    raw["vision_config"] = SMALL | raw["vision_config"]
    raw[part][key] = value
    return {"model_type": "sam", **raw}


def test_the_whole_config_of_transformers_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    raw = json.loads(json.dumps(transformers.SamConfig().to_dict()))
    assert sam.config_from_hf(raw).encoder == sam.SamVitSpec(768, 12, 12, (2, 5, 8, 11), 3072)
    plain = sam.config_from_hf({"model_type": "sam", "vision_config": SMALL})
    assert sam.config_from_hf(changed("mask_decoder_config", "layer_norm_eps", 1e-5)) == plain
    ratio = sam.config_from_hf({"model_type": "sam", "vision_config": {"mlp_ratio": 4.001}})
    assert ratio.encoder.inner == int(768 * 4.001)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("vision_config", "hidden_act", "relu"),
        ("vision_config", "use_rel_pos", False),
        ("vision_config", "use_abs_pos", False),
        ("vision_config", "qkv_bias", False),
        ("vision_config", "num_channels", 4),
        ("vision_config", "output_channels", 128),
        ("prompt_encoder_config", "hidden_act", "relu"),
        ("prompt_encoder_config", "layer_norm_eps", 1e-2),
        ("prompt_encoder_config", "image_size", 1024),
        ("mask_decoder_config", "hidden_act", "gelu"),
        ("mask_decoder_config", "num_attention_heads", 4),
        ("mask_decoder_config", "layer_norm_eps", 1e-2),
        ("mask_decoder_config", "attention_downsample_rate", 4),
        ("mask_decoder_config", "num_multimask_outputs", 5),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(part: str, key: str, value: object) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{part}\.{key}={re.escape(repr(value))}".replace("'", "[\"']")
    ):
        sam.config_from_hf(changed(part, key, value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "x"),
        ("hidden_size", 10**9),
        ("hidden_size", 50),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**7),
        ("num_attention_heads", 0),
        ("global_attn_indexes", 3),
        ("global_attn_indexes", ["1"]),
        ("global_attn_indexes", None),
        ("mlp_ratio", "a"),
        ("mlp_dim", 0),
        ("layer_norm_eps", "0"),
        ("layer_norm_eps", 0),
        ("patch_size", 0),
        ("image_size", [1024]),
        ("image_size", 100),
        ("window_size", 0),
    ],
)
def test_sizes_that_are_none_are_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        sam.config_from_hf({"model_type": "sam", "vision_config": SMALL | {key: value}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["prompt_encoder_config", "mask_decoder_config"])
def test_a_part_that_is_no_object(part: str) -> None:
    with pytest.raises(CheckpointError, match=f"{part} must be an object"):
        sam.config_from_hf({"model_type": "sam", "vision_config": SMALL, part: 3})


ORIGINAL = {
    "mask_decoder.iou_token.weight": (1, 256),
    "image_encoder.pos_embed": (1, 4, 4, 32),
    "image_encoder.patch_embed.proj.weight": (32, 3, 16, 16),
    "image_encoder.blocks.0.attn.qkv.weight": (96, 32),
    "image_encoder.blocks.0.attn.rel_pos_h": (7, 16),
    "image_encoder.blocks.0.mlp.lin1.weight": (64, 32),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pos_embed", (4,)),
        ("pos_embed", (1, 0, 0, 32)),
        ("patch_embed.proj.weight", (32,)),
        ("patch_embed.proj.weight", None),
        ("blocks.0.attn.qkv.weight", None),
        ("blocks.0.attn.rel_pos_h", None),
        ("blocks.0.attn.rel_pos_h", (7,)),
        ("blocks.0.attn.rel_pos_h", (7, 0)),
        ("blocks.0.attn.rel_pos_h", (7, 64)),
        ("blocks.0.mlp.lin1.weight", ()),
        ("blocks.0.mlp.lin1.weight", None),
    ],
    ids=str,
)
def test_an_original_file_that_is_not_whole_is_named(
    name: str, shape: tuple[int, ...] | None
) -> None:
    parsed = sam.config_from_shapes(ORIGINAL)
    assert parsed is not None
    assert sam.config_from_hf(parsed).encoder == sam.SamVitSpec(
        32, 1, 2, (0,), 64, image=64, patch=16
    )
    shapes = {n: s for n, s in ORIGINAL.items() if n != f"image_encoder.{name}"}
    if shape is not None:
        shapes[f"image_encoder.{name}"] = shape
    if name == "blocks.0.attn.qkv.weight":
        shapes = {n: s for n, s in shapes.items() if ".blocks.0." not in n} | {
            "image_encoder.blocks.3.attn.qkv.weight": (1,)
        }
    with pytest.raises(CheckpointError) as caught:
        sam.config_from_hf(sam.config_from_shapes(shapes) or {})
    assert "\n" not in str(caught.value)


def test_relative_positions_stretch_as_torch_does() -> None:
    table = torch.randn(7, 5)
    assert resize_rel_pos(table, 7) is table
    expected = torch.nn.functional.interpolate(table[None].transpose(1, 2), size=13, mode="linear")[
        0
    ].t()
    assert torch.equal(resize_rel_pos(table, 13), expected)


def test_missing_and_left_over_tensors_are_named(hf_model) -> None:
    state = dict(hf_model.state_dict())
    state["vision_encoder.extra"] = state.pop("vision_encoder.neck.conv1.weight")
    with pytest.raises(TensorMismatch, match=re.escape("vision_encoder.neck.conv1.weight")):
        make_model(state, {"model_type": "sam", "vision_config": SMALL})

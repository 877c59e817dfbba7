"""Segment Anything: ViT-B, -L, -H, and MobileSAM's TinyViT.

Kirillov et al. 2023, arXiv:2304.02643. Modules have the names of the original checkpoints;
``_sam_transformers_names`` has those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import TensorMismatch
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _sam_transformers_names
from modelmill.models._rename_rules import layer_stack_rename_rules, rename_rules_outside_layers
from modelmill.models._sam_config import EMBED_WIDTH, spec_from_hf, spec_from_sizes_section
from modelmill.models._sam_mask_decoder import SamMaskDecoder
from modelmill.models._sam_prompt_encoder import SamPromptEncoder
from modelmill.models._sam_tiny_vit import (
    PATCH_EMBED_SOURCES,
    TinyVitEncoder,
    TinyVitSpec,
    stage_conv_tensor_sources,
)
from modelmill.models._sam_vit import SamVitEncoder, SamVitSpec
from modelmill.nn.layer_stack import LayerStack, stack_layer_specs
from modelmill.nn.vision_context import VisionContext

ENGINE_TYPE = "segmentation"
# Float32 in every dtype: prompts and masks are 4 million of the 9 to 640 million parameters and a
# click's whole precision (angles of hundreds of radians, logits cut at 0); the biases are a table
# that the op reads as float32.
FLOAT32_TENSORS = (r"(prompt_encoder|mask_decoder)\..*", r".*\.attention_biases")
CHECKPOINT_PREFIXES = ("", "module.", "model.")
UNUSED_CONFIG_KEYS = ("projection_dim", "tie_word_embeddings", "scale")
IMAGE_MEAN, IMAGE_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# a head's size is not written anywhere in the original files
HEADS_BY_WIDTH = {768: 12, 1024: 16, 1280: 16}


@dataclass(frozen=True)
class SamConfig:
    """encoder: its sizes.

    checkpoint_layout: whose names the checkpoint has, "original" or "transformers".
    """

    encoder: SamVitSpec | TinyVitSpec
    checkpoint_layout: str = "original"


def config_from_hf(raw: RawConfig) -> SamConfig:
    """Sizes from transformers' config.json or from the result of ``config_from_shapes``.

    Raises:
        CheckpointError: for invalid sizes, and for settings that would change the arithmetic and
            are not computed.
    """
    if raw.get("encoder") == "vit_t":
        return SamConfig(TinyVitSpec())
    if raw.get("encoder") == "vit":
        return SamConfig(spec_from_sizes_section(raw))
    return SamConfig(spec_from_hf(raw), "transformers")


def config_from_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """A raw config from the tensors of an original file, which has no config.json.

    Returns:
        None where the tensors are not SAM's.

    Raises:
        TensorMismatch: where they are, but a tensor that determines a size is missing or has
            another shape.
    """
    prefix = next(
        (p for p in CHECKPOINT_PREFIXES if f"{p}mask_decoder.iou_token.weight" in shapes), None
    )
    if prefix is None:
        return None
    own = {name.removeprefix(prefix): tuple(shape) for name, shape in shapes.items()}
    if "image_encoder.patch_embed.seq.0.c.weight" in own:
        return {"model_type": "sam", "encoder": "vit_t"}
    if "image_encoder.pos_embed" not in own:
        return None
    _, grid, _, width = _checked_tensor_shape(own, "image_encoder.pos_embed", 4)
    patch = _checked_tensor_shape(own, "image_encoder.patch_embed.proj.weight", 4)[2]
    inner = _checked_tensor_shape(own, "image_encoder.blocks.0.mlp.lin1.weight", 2)[0]
    layers = sum(
        1 for name in own if re.fullmatch(r"image_encoder\.blocks\.\d+\.attn\.qkv\.weight", name)
    )
    tables = [
        _checked_tensor_shape(own, f"image_encoder.blocks.{i}.attn.rel_pos_h", 2)
        for i in range(max(layers, 1))
    ]
    dim = tables[0][1]
    lengths = {length for length, _ in tables}
    # windows are smaller than the image; where all layers are alike, they see what their tables
    # reach
    short = min(lengths) if len(lengths) > 1 or lengths != {2 * grid - 1} else 0
    sizes = {
        "width": width,
        "depth": layers,
        "heads": HEADS_BY_WIDTH.get(width, width // dim),
        "global_attn_indexes": [i for i, (length, _) in enumerate(tables) if length > short],
        "inner": inner,
        "image": grid * patch,
        "patch": patch,
        "window": ((short or 27) + 1) // 2,
    }
    rows = max(lengths)
    if rows > short and rows != 2 * grid - 1:
        sizes["rel_pos_rows"] = rows
    return {"model_type": "sam", "encoder": "vit", "sizes": sizes}


def _checked_tensor_shape(
    shapes: Mapping[str, tuple[int, ...]], name: str, dims: int
) -> tuple[int, ...]:
    """A tensor's shape of ``dims`` sizes above 0."""
    shape = shapes.get(name)
    if shape is None or len(shape) != dims or 0 in shape:
        state = "is missing" if shape is None else f"has shape {list(shape)}"
        raise TensorMismatch(
            f"{name} {state} where {dims} dimensions above 0 are needed; the file is no whole "
            "SAM, download it again"
        )
    return shape


class Model(nn.Module):
    """The three stages.

    ``config`` holds the sizes. Recipes quantize the encoder's linear layers alone.
    """

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        spec = config.encoder
        self.image_encoder = (
            TinyVitEncoder(spec) if isinstance(spec, TinyVitSpec) else SamVitEncoder(spec)
        )
        path = f"image_encoder.{self.image_encoder.stack}"
        self.layer_stacks = (LayerStack(path, "encoder-{:04d}", reads_images=True),)
        self.prompt_encoder = SamPromptEncoder(
            EMBED_WIDTH, config.encoder.image, config.encoder.tokens_per_side
        )
        self.mask_decoder = SamMaskDecoder(EMBED_WIDTH)

    def encode_image(self, images: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """Normalised, padded images [B, 3, S, S] → embeddings [B, 256, S/16, S/16]."""
        return self.image_encoder(images, vision)

    def decode_masks(
        self,
        embedding: torch.Tensor,
        points: torch.Tensor,
        labels: torch.Tensor,
        masks: torch.Tensor | None,
        vision: VisionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts on images to masks.

        embedding: [N, 256, G, G], or [1, 256, G, G] for N prompts on one image. points [N, P, 2],
        labels [N, P] as in ``SamPromptEncoder.embed_points``; masks: [N, 1, 4·G, 4·G] logits or
        None. Returns the logits of the single mask and the three of an ambiguous prompt, [N, 4,
        4·G, 4·G] float32, and their predicted IoUs [N, 4] float32.
        """
        prompts = self.prompt_encoder
        sparse, dense = (
            prompts.embed_points(points, labels),
            prompts.embed_masks(masks, len(points)),
        )
        return self.mask_decoder(embedding, prompts.dense_pe(), sparse, dense, vision)


def rename_rules(config: SamConfig) -> list[Rule]:
    """Every tensor of the model, from the names of the checkpoint's layout."""
    model = Model(config)
    [stack] = model.layer_stacks
    specs = stack_layer_specs(model, stack)
    if config.checkpoint_layout == "transformers":
        names = _sam_transformers_names
        out = rename_rules_outside_layers(
            model, (stack.path,), names.TRANSFORMERS_NAMES, names.TRANSFORMERS_SOURCES
        )
        out += layer_stack_rename_rules(
            specs, names.BLOCK_NAMES, names.ENCODER_LAYERS_PATH, target=stack.path
        )
    elif isinstance(config.encoder, TinyVitSpec):
        out = rename_rules_outside_layers(model, (stack.path,), {}, PATCH_EMBED_SOURCES)
        folded = stage_conv_tensor_sources(specs)
        out += layer_stack_rename_rules(specs, {}, stack.path, target=stack.path, tensors=folded)
    else:  # the model has the original names
        out = rename_rules_outside_layers(model, (stack.path,), {})
        out += layer_stack_rename_rules(specs, {}, stack.path, target=stack.path)
    return sorted(out, key=lambda rule: rule.target)


def ignored_tensors(config: SamConfig) -> list[str]:
    """Unused: MobileSAM's classifier and transformers' second copy of the Fourier matrix."""
    if config.checkpoint_layout == "transformers":
        return [r"prompt_encoder\.shared_embedding\..*"]
    return [r"image_encoder\.(norm_head|head)\..*", r".*\.num_batches_tracked", "pixel_mean",
        "pixel_std", r".*\.ab",
            r".*\.attention_bias_idxs"]  # fmt: skip

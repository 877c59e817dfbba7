"""MiniGPT-4 (Zhu et al. 2023, arXiv:2304.10592): a LLaMA behind BLIP-2's vision encoder.

The language model is the plain decoder; ``encode_images`` turns pictures into embeddings that stand
in a prompt like tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _blip2_vision, llama
from modelmill.models._blip2_vision import (
    IMAGE_MEAN,
    IMAGE_STD,
    Blip2ImageEmbedder,
    Blip2VisionSpec,
)
from modelmill.models._eva_vit import EVA_G, EvaSpec
from modelmill.models._hf_config import check_vit_sizes, positive_float, positive_int
from modelmill.models._qformer import QFORMER_BASE, QFormerSpec
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.layer_stack import DECODER_STACK, LayerStack
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import Ops

CHECKPOINT_PREFIXES = ("",)
# computed in float32 whatever the rest is stored in, as the original does
FLOAT32_TENSORS = (r"image_embedder\.ln_vision\.(weight|bias)",)
IMAGE_EMBEDDER_PREFIX = "image_embedder."
# in front of the decoder's tensors (checkpoint.minigpt4_parts)
LANGUAGE_MODEL_PREFIX = "llama_model."
# of BLIP-2's parts: the queries have no words and no positions; whether words are tied is the
# language model's
SUPPORTED_VALUES = {"position_embedding_type": ("absolute",), "num_channels": (3,)}
UNUSED_CONFIG_KEYS = (
    "image_text_hidden_size", "qformer_config.max_position_embeddings",
    "use_decoder_only_language_model",
    "tie_word_embeddings", "projection_dim",
)  # fmt: skip
LANGUAGE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Language models that may stand behind the vision encoder: all of them the plain decoder."""


@dataclass(frozen=True)
class MiniGpt4Config(DecoderConfig):
    """The sizes of the decoder and of the vision encoder."""

    image_embedder: Blip2VisionSpec = field(
        default_factory=lambda: Blip2VisionSpec(EVA_G, QFORMER_BASE, 4096)
    )


class Model(Decoder):
    """The decoder with a vision encoder, whose blocks have a recipe of their own."""

    layer_stacks = (
        DECODER_STACK,
        LayerStack(
            f"{IMAGE_EMBEDDER_PREFIX}visual_encoder.blocks",
            "image_embedder-{:04d}",
            recipe="tower",
            reads_images=True,
        ),
        LayerStack(
            f"{IMAGE_EMBEDDER_PREFIX}qformer.layer", "image_embedder", recipe="", reads_images=True
        ),
    )
    own_weight_files = ("image_embedder",)
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: MiniGpt4Config) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.image_embedder = Blip2ImageEmbedder(config.image_embedder)
        # constants on the device, where a graph of ``encode_images`` finds them
        self.register_buffer("mean", torch.tensor(IMAGE_MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(IMAGE_STD).view(3, 1, 1))
        self.image_size = config.image_embedder.vision_encoder.image
        self.image_tokens = config.image_embedder.qformer.queries

    def encode_images(self, images: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Pictures [B, 3, S, S] uint8 → embeddings [B, 32, hidden] in the model's type."""
        like = self.image_embedder.visual_encoder.pos_embed
        embeddings: torch.Tensor = self.image_embedder(
            self.normalize(images).to(like.dtype), VisionContext(ops)
        )
        return embeddings

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, S, S] uint8 → float32."""
        # divided by 255 first and in float32, as torchvision's ToTensor and Normalize do
        return (images.float() / 255 - self.mean) / self.std


def config_from_hf(raw: RawConfig) -> MiniGpt4Config:
    """Sizes of the language model and the vision encoder.

    Raises:
        CheckpointError: where the vision encoder's sizes are missing or do not fit together.
        UnknownArchitecture: where the language model is none of ``LANGUAGE_MODEL_TYPES``.
    """
    sizes = raw.get("image_embedder")
    if not isinstance(sizes, Mapping):
        raise CheckpointError(
            'config.json: of a minigpt4 lacks "image_embedder", the sizes of its vision encoder'
        )
    model_type = sizes.get("language", "llama")
    family = (
        import_module_if_exists("modelmill.models", str(model_type))
        if model_type in LANGUAGE_MODEL_TYPES
        else None
    )
    if family is None:
        raise UnknownArchitecture(
            f"the language model has the model_type {quote(model_type, 60)}; known there are "
            f"{', '.join(LANGUAGE_MODEL_TYPES)}"
        )
    decoder = family.config_from_hf(raw)
    eps = sizes.get("eps", {})
    if not isinstance(eps, Mapping):
        raise CheckpointError('config.json: "eps" of image_embedder must be an object')
    encoder = EvaSpec(
        **_read_spec_sizes(sizes.get("vision_encoder"), EVA_G),
        eps=positive_float(eps, "vision_encoder", default=EvaSpec.eps),
    )
    qformer = QFormerSpec(
        **_read_spec_sizes(sizes.get("qformer"), QFORMER_BASE),
        eps=positive_float(eps, "qformer", default=QFormerSpec.eps),
    )
    check_vit_sizes(
        "vision encoder",
        width=encoder.width,
        heads=encoder.heads,
        image=encoder.image,
        patch=encoder.patch,
    )
    check_vit_sizes("Q-Former", width=qformer.width, heads=qformer.heads)
    shared = {each.name: getattr(decoder, each.name) for each in fields(decoder)}
    between = positive_float(eps, "between", default=Blip2VisionSpec.norm_eps)
    return MiniGpt4Config(
        **shared, image_embedder=Blip2VisionSpec(encoder, qformer, decoder.hidden, between)
    )


def rename_rules(config: MiniGpt4Config) -> list[Rule]:
    """The decoder's tensors behind ``llama_model.``, the vision encoder's from their own files."""
    decoder = [
        replace(r, sources=tuple(LANGUAGE_MODEL_PREFIX + s for s in r.sources))
        for r in llama.CHECKPOINT_LAYOUT.rename_rules(config)
    ]
    return decoder + [
        replace(r, target=IMAGE_EMBEDDER_PREFIX + r.target)
        for r in _blip2_vision.rename_rules(config.image_embedder)
    ]


def ignored_tensors(config: MiniGpt4Config) -> list[str]:
    """Tensors that neither the decoder nor the vision encoder reads."""
    return [
        rf"{LANGUAGE_MODEL_PREFIX}{pattern}"
        for pattern in llama.CHECKPOINT_LAYOUT.ignored_tensors(config)
    ] + _blip2_vision.ignored_tensors(config.image_embedder)


def _read_spec_sizes(sizes: Any, defaults: Any) -> dict[str, int]:
    """The integers of a spec; a missing one has its published value."""
    if not isinstance(sizes, Mapping):
        raise CheckpointError(
            'config.json: "image_embedder" of a minigpt4 has no vision_encoder or no qformer'
        )
    names = {each.name for each in fields(defaults) if each.name != "eps"}
    unknown = sorted(set(sizes) - names)
    if unknown:
        raise CheckpointError(
            f"image_embedder has no size {unknown[0]!r}; known are {', '.join(sorted(names))}"
        )
    return {name: positive_int(sizes, name, default=getattr(defaults, name)) for name in names}

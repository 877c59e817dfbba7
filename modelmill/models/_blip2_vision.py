"""From images to embeddings that a language model takes: encoder, norm, Q-Former, projection.

MiniGPT-4 keeps them in three files (EVA's ViT-g, BLIP-2's Q-Former, its own projection),
transformers' BLIP-2 in one under other names (``checkpoint.blip2``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.models._eva_vit import BLOCK_SOURCES, EvaSpec, EvaVisionEncoder
from modelmill.models._qformer import QFormer, QFormerSpec
from modelmill.models._rename_rules import (
    SourceTensors,
    layer_stack_rename_rules,
    rename_rules_outside_layers,
)
from modelmill.nn.conv import VisionLayerNorm
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext

IMAGE_MEAN, IMAGE_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CHECKPOINT_NAMES = {
    "qformer.norm": ("Qformer.bert.embeddings.LayerNorm",),
    "proj": ("llama_proj",),
}
QUERY_SOURCES = {"qformer.query_tokens": SourceTensors(("query_tokens",))}
CHECKPOINT_PREFIXES = ("", "visual_encoder.", "module.", "model.")


@dataclass(frozen=True)
class Blip2VisionSpec:
    """out: the language model's width.

    norm_eps: of the norm between vision encoder and Q-Former.
    """

    vision_encoder: EvaSpec
    qformer: QFormerSpec
    out: int
    norm_eps: float = 1e-5


class Blip2ImageEmbedder(nn.Module):
    """BLIP-2's image path: vision encoder, Q-Former, projection to the LLM's width."""

    def __init__(self, spec: Blip2VisionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.visual_encoder = EvaVisionEncoder(spec.vision_encoder)
        self.ln_vision = VisionLayerNorm(spec.vision_encoder.width, spec.norm_eps)
        self.qformer = QFormer(spec.qformer)
        self.proj = Linear(spec.qformer.width, spec.out, bias=True)

    def forward(self, images: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """Normalised images [B, 3, S, S] → [B, 32, out]."""
        return self.run_qformer_and_project(self.visual_encoder(images, vision), vision)

    def run_qformer_and_project(
        self, image_tokens: torch.Tensor, vision: VisionContext
    ) -> torch.Tensor:
        """The vision encoder's tokens [B, T, C] → [B, 32, out]."""
        # in float32, as the original does even where the vision encoder is in 16 bits
        norm = self.ln_vision
        wide = torch.nn.functional.layer_norm(
            image_tokens.float(),
            (image_tokens.shape[-1],),
            norm.weight.float(),
            norm.bias.float(),
            norm.eps,
        )
        return vision.apply_linear(self.proj, self.qformer(wide.to(image_tokens.dtype), vision))


def rename_rules(spec: Blip2VisionSpec) -> list[Rule]:
    """Every tensor of the image embedder, from the names of the published files."""
    with torch.device("meta"):
        embedder = Blip2ImageEmbedder(spec)
    blocks, layers = "visual_encoder.blocks", "qformer.layer"
    out = rename_rules_outside_layers(embedder, (blocks, layers), CHECKPOINT_NAMES, QUERY_SOURCES)
    block_specs = [spec.vision_encoder.block_spec] * spec.vision_encoder.depth
    out += layer_stack_rename_rules(block_specs, {}, blocks, target=blocks, tensors=BLOCK_SOURCES)
    layer_specs = [spec.qformer.layer_spec(i) for i in range(spec.qformer.depth)]
    out += layer_stack_rename_rules(layer_specs, {}, "Qformer.bert.encoder.layer", target=layers)
    return sorted(out, key=lambda rule: rule.target)


def ignored_tensors(spec: Blip2VisionSpec) -> list[str]:
    """The vision encoder's last block and heads, the Q-Former's text branch, other projections."""
    return [
        rf"(visual_encoder\.)?blocks\.{spec.vision_encoder.depth}\..*",
        r"(visual_encoder\.)?(norm|fc_norm|head)\..*",
        r"Qformer\.bert\.embeddings\.(word_embeddings|position_embeddings|position_ids).*",
        r"Qformer\.bert\.encoder\.layer\.\d+\.(intermediate|output)\..*",
        r"Qformer\.(cls|bert\.pooler)\..*",
        r"(vision_proj|text_proj|itm_head|t5_proj|opt_proj)\..*",
        "temp",
    ]

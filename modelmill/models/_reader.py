"""From images to embeddings that a language model takes as inputs: tower, norm, Q-Former, projection.

MiniGPT-4 keeps them in three files (EVA's ViT-g, BLIP-2's Q-Former, its own projection), transformers' BLIP-2 in one
under other names (``checkpoint.blip2``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.models._eva import EvaSpec, Tower
from modelmill.models._qformer import QFormer, QFormerSpec
from modelmill.nn.conv import PlainNorm
from modelmill.nn.linear import Linear
from modelmill.nn.still import Still

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PREFIXES = ("", "visual_encoder.", "module.", "model.")


@dataclass(frozen=True)
class ReaderSpec:
    """out: the language model's width. norm_eps: of the norm between tower and Q-Former."""

    tower: EvaSpec
    qformer: QFormerSpec
    out: int
    norm_eps: float = 1e-5


class Reader(nn.Module):
    """Images to embeddings."""

    def __init__(self, spec: ReaderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.visual_encoder = Tower(spec.tower)
        self.ln_vision = PlainNorm(spec.tower.width, spec.norm_eps)
        self.qformer = QFormer(spec.qformer)
        self.proj = Linear(spec.qformer.width, spec.out, bias=True)

    def forward(self, images: torch.Tensor, still: Still) -> torch.Tensor:
        """Normalised images [B, 3, S, S] → [B, 32, out]."""
        return self.told(self.visual_encoder(images, still), still)

    def told(self, seen: torch.Tensor, still: Still) -> torch.Tensor:
        """The tower's tokens [B, T, C] → [B, 32, out]."""
        # in float32, as the original does even where the tower is in 16 bits
        norm = self.ln_vision
        wide = torch.nn.functional.layer_norm(
            seen.float(), (seen.shape[-1],), norm.weight.float(), norm.bias.float(), norm.eps
        )
        return still.linear(self.proj, self.qformer(wide.to(seen.dtype), still))


def rules(spec: ReaderSpec) -> list[Rule]:
    """Every tensor of the reader, from the names of the published files."""
    with torch.device("meta"):
        reader = Reader(spec)
    names = [name for name, _ in reader.named_buffers()]
    names += [f"{name}.weight" for name, module in reader.named_modules() if isinstance(module, Linear)]
    return [_original(name) for name in sorted(names)]


def drops(spec: ReaderSpec) -> list[str]:
    """The tower's last block and heads, the Q-Former's text branch, other projections."""
    return [
        rf"(visual_encoder\.)?blocks\.{spec.tower.depth}\..*",
        r"(visual_encoder\.)?(norm|fc_norm|head)\..*",
        r"Qformer\.bert\.embeddings\.(word_embeddings|position_embeddings|position_ids).*",
        r"Qformer\.bert\.encoder\.layer\.\d+\.(intermediate|output)\..*",
        r"Qformer\.(cls|bert\.pooler)\..*",
        r"(vision_proj|text_proj|itm_head|t5_proj|opt_proj)\..*",
        "temp",
    ]


_ORIGINAL = (
    (r"^qformer\.query_tokens$", "query_tokens"),
    (r"^qformer\.norm\.", "Qformer.bert.embeddings.LayerNorm."),
    (r"^qformer\.layer\.", "Qformer.bert.encoder.layer."),
    (r"^proj\.", "llama_proj."),
)


def _spelled(name: str, spellings: tuple[tuple[str, str], ...]) -> str:
    for pattern, spelling in spellings:
        changed = re.sub(pattern, spelling, name)
        if changed != name:
            return changed
    return name


def _original(name: str) -> Rule:
    found = re.fullmatch(r"(visual_encoder\.blocks\.\d+\.attn)\.qkv\.bias", name)
    if found is not None:
        return Rule(name, (f"{found[1]}.q_bias", f"{found[1]}.v_bias"), "bias_q0v")
    return Rule(name, (_spelled(name, _ORIGINAL),))

"""Qwen v1 (QWenLMHeadModel): the plain decoder with its own names, dynamic NTK and logn.

α depends on the length of the prompt and is constant during decode; logn scales the query (after
RoPE) at positions beyond the trained length, counted from 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.decoder import DecoderReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import TensorMismatch

NAME_PREFIX = "transformer."
# Keys of the first release and the current ones.
LEGACY_KEY_BY_CURRENT_KEY = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
}
PROJECTION_PATHS = {"o_proj": "attn.c_proj", "gate": "mlp.w2", "up": "mlp.w1", "down": "mlp.c_proj"}
NORM_PATHS = {"input_norm": "ln_1", "mlp_norm": "ln_2"}


def with_current_config_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with current keys filled in from the old ones if only those are set."""
    filled = dict(config)
    for new, old in LEGACY_KEY_BY_CURRENT_KEY.items():
        if filled.get(new) is None and config.get(old) is not None:
            filled[new] = config[old]
    return filled


class QwenReference(DecoderReference):
    """Qwen v1; ``prompt_length`` decides α for the whole sequence."""

    EMBEDDING = "transformer.wte.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        config = with_current_config_keys(config)
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        dim = int(config.get("kv_channels") or width // heads)
        self.seq_length = int(
            config.get("seq_length") or config.get("max_position_embeddings") or 2048
        )
        self.dynamic_ntk = bool(config.get("use_dynamic_ntk", False))
        self.use_logn = bool(config.get("use_logn_attn", False))
        base = float(config.get("rotary_emb_base") or 10000.0)
        rope = ReferenceRope(int(dim * float(config.get("rotary_pct", 1.0))), base, self.seq_length)
        config |= {
            "head_dim": dim,
            "num_key_value_heads": heads,
            "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
        }
        super().__init__(source, config, rope)
        self.norm_paths = dict(NORM_PATHS)

    def ntk_alpha(self, prompt_length: int) -> float:
        """Return max(2^(⌈log2(L / seq_length) + 1⌉) − 1, 1)."""
        if not self.dynamic_ntk:
            return 1.0
        return max(2.0 ** math.ceil(math.log2(prompt_length / self.seq_length) + 1) - 1, 1.0)

    def rope_for_prompt_length(self, prompt_length: int) -> ReferenceRope:
        """Return the rotary embedding for a prompt of this length."""
        assert self.rope is not None
        d = self.rope.rotary_dim
        return replace(
            self.rope, theta=self.rope.theta * self.ntk_alpha(prompt_length) ** (d / (d - 2))
        )

    def query_scaling_by_position(self, count: int) -> Tensor | None:
        """Return [count]: ln p / ln seq_length at position p > seq_length (from 1), else 1."""
        if not self.use_logn:
            return super().query_scaling_by_position(count)
        place = torch.arange(1, count + 1, dtype=torch.float64)
        stretch = place.log() / math.log(self.seq_length)
        return torch.where(place > self.seq_length, stretch, 1.0).to(self.device, self.dtype)

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's projections; q, k and v are one matrix."""
        stem = f"{self.LAYERS}.{index}"
        fused = self.read_linear(f"{stem}.attn.c_attn", True)
        width = self.num_heads * self.head_dim
        if len(fused.weight) != 3 * width:
            raise TensorMismatch(
                f"{stem}.attn.c_attn.weight has {len(fused.weight)} rows, its config asks for 3 × "
                f"{width}"
            )
        assert fused.bias is not None
        parts = zip("qkv", fused.weight.chunk(3), fused.bias.chunk(3), strict=True)
        biased = not self.config.get("no_bias", True)
        return {name: ModuleWeights(rows, bias) for name, rows, bias in parts} | {
            name: self.read_linear(f"{stem}.{path}", biased)
            for name, path in PROJECTION_PATHS.items()
        }


REFERENCE = QwenReference

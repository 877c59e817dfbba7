"""gpt2: learned positions, LayerNorm, one fused qkv, tanh-GELU; projections stored [in, out]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."


class Gpt2Reference(Gpt2NamesReference):
    """GPT2LMHeadModel; ``fc`` stands for gate and up."""

    DEFAULTS = ReferenceDefaults(tied=True)
    POSITIONS = "transformer.wpe.weight"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"num_key_value_heads": None, "head_dim": None})
        self.activation = self.activation_from_config("activation_function", "gelu_new")
        self.norm_paths = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
        self.projection_paths = {
            "o_proj": "attn.c_proj",
            "fc": "mlp.c_fc",
            "down": "mlp.c_proj",
        }
        if not config.get("scale_attn_weights", True):
            self.score_scale = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """Add each position's row."""
        return super().embed(ids) + self.source.rows(self.POSITIONS, torch.arange(len(ids)))

    def embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING, "positions": self.POSITIONS}

    def read_linear(self, stem: str, biased: bool) -> ModuleWeights:
        """Read a projection, which is stored [in, out] and has a bias."""
        del biased
        return ModuleWeights(self.source.get(f"{stem}.weight").T, self.source.get(f"{stem}.bias"))

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Split the fused matrix."""
        fused = self.read_linear(f"{self.LAYERS}.{index}.attn.c_attn", True)
        assert fused.bias is not None
        parts = zip("qkv", fused.weight.chunk(3), fused.bias.chunk(3), strict=True)
        qkv = {name: ModuleWeights(rows, bias) for name, rows, bias in parts}
        return qkv | super().token_mixer_weights(index)

    def run_attention_core(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run causal attention, in some models with scores divided by the layer's number."""
        by_layer = self.config.get("scale_attn_by_inverse_layer_idx")
        return super().run_attention_core(index, q / (index + 1) if by_layer else q, k, v)


REFERENCE = Gpt2Reference

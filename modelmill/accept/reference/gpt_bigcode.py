"""gpt_bigcode: learned positions, all heads with one key and value (arXiv:2301.03988)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerWeights
from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ModuleWeights, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."


class GptBigCodeReference(Gpt2NamesReference):
    """GPTBigCodeForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)
    POSITIONS = "transformer.wpe.weight"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        self.one_key = bool(config.get("multi_query", True))
        kv_heads = 1 if self.one_key else None
        super().__init__(source, config | {"num_key_value_heads": kv_heads, "head_dim": None})
        self.activation = self.activation_from_config("activation_function", "gelu_pytorch_tanh")
        self.norm_paths = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
        self.projection_paths = {"o_proj": "attn.c_proj", "fc": "mlp.c_fc", "down": "mlp.c_proj"}
        self.biased = frozenset(self.projection_paths)

    def embed(self, ids: Tensor) -> Tensor:
        """Add each position's row."""
        return super().embed(ids) + self.source.rows(self.POSITIONS, torch.arange(len(ids)))

    def embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING, "positions": self.POSITIONS}

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Split the fused matrix: all of q, then a key and a value; or each head's three."""
        fused = self.read_linear(f"{self.LAYERS}.{index}.attn.c_attn", True)
        weights = super().token_mixer_weights(index)
        if not self.one_key:
            return self.split_qkv_by_kv_head(fused) | weights
        assert fused.bias is not None
        sizes = [self.hidden_size, self.head_dim, self.head_dim]
        parts = zip("qkv", fused.weight.split(sizes), fused.bias.split(sizes), strict=True)
        return {name: ModuleWeights(rows, bias) for name, rows, bias in parts} | weights


REFERENCE = GptBigCodeReference

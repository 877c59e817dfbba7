"""gpt_neo: windows in every other layer, scores without a factor (doi:10.5281/zenodo.5297715)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class GPTNeoReference(Gpt2NamesReference):
    """GPTNeoForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)
    POSITIONS = "transformer.wpe.weight"
    OLDER_KEYS = (("num_hidden_layers", "num_layers"), ("num_attention_heads", "num_heads"))

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.activation_from_config("activation_function", "gelu_new")
        self.score_scale = 1.0
        self.norm_paths = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
        attention = {name: f"attn.attention.{name}_proj" for name in ("q", "k", "v")}
        outputs = {"o_proj": "attn.attention.out_proj", "fc": "mlp.c_fc", "down": "mlp.c_proj"}
        self.projection_paths = attention | outputs
        self.biased = frozenset(outputs)
        size = int(config.get("window_size", 256))
        self.windows = [
            size if each == "local" else None
            for types, count in config.get("attention_types", [[["global", "local"], 12]])
            for each in types * count
        ]

    def embed(self, ids: Tensor) -> Tensor:
        """Add each position's row."""
        return super().embed(ids) + self.source.rows(self.POSITIONS, torch.arange(len(ids)))

    def embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING, "positions": self.POSITIONS}


REFERENCE = GPTNeoReference

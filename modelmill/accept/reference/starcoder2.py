"""starcoder2: LayerNorm, an MLP of two matrices, windows (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PROJECTIONS, PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("starcoder2",)
NAME_PREFIX = "model."


class Starcoder2Reference(PlainDecoderReference):
    """Starcoder2ForCausalLM."""

    TIED_BY_DEFAULT = True
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads", 2))
        self.eps = float(config.get("norm_epsilon", 1e-5))
        self.activation = self.read_activation("hidden_act", "gelu_pytorch_tanh")
        length = int(config.get("max_position_embeddings") or 4096)
        self.rope = rope_from_config(config, self.head_dim, length)
        attention = {name: PROJECTIONS[name] for name in ("q", "k", "v", "o_proj")}
        self.projection_paths = attention | {"fc": "mlp.c_fc", "down": "mlp.c_proj"}
        if config.get("use_bias", True):
            self.biased = frozenset(self.projection_paths)
        self.windows = [config.get("sliding_window")] * self.num_layers


REFERENCE = Starcoder2Reference

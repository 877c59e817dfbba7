"""gptj: parallel layers behind one norm, neighbouring channels rotated (mesh-transformer-jax)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("gptj",)
NAME_PREFIX = "transformer."


class GptJReference(PlainDecoderReference):
    """GPTJForCausalLM; its head has a bias."""

    EMBEDDING = "transformer.wte.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        names = {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        }
        own = {name: config[old] for name, old in names.items() if config.get(old) is not None}
        super().__init__(source, config | own)
        self.eps = float(config.get("layer_norm_epsilon", 1e-5))
        self.activation = self.read_activation("activation_function", "gelu_new")
        length = int(self.config.get("max_position_embeddings") or 2048)
        self.rope = ReferenceRope(int(config.get("rotary_dim") or 64), 10000.0, length)
        self.turns_neighbours = True
        self.norm_paths = {"input_norm": "ln_1"}
        attention = {name: f"attn.{name}_proj" for name in ("q", "k", "v")}
        mlp = {"fc": "mlp.fc_in", "down": "mlp.fc_out"}
        self.projection_paths = attention | {"o_proj": "attn.out_proj"} | mlp
        self.biased = frozenset(mlp)
        self.layer = self.parallel

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Add the head's bias."""
        return logits + self.source.get("lm_head.bias")


REFERENCE = GptJReference

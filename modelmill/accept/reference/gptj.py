"""gptj: parallel layers behind one norm, neighbouring channels rotated (mesh-transformer-jax)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."


class GptJReference(Gpt2NamesReference):
    """GPTJForCausalLM; its head has a bias."""

    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.activation_from_config("activation_function", "gelu_new")
        self.rope = ReferenceRope(int(config.get("rotary_dim") or 64), 10000.0, self.max_position)
        self.norm_paths = {"input_norm": "ln_1"}
        attention = {name: f"attn.{name}_proj" for name in "qkv"}
        mlp = {"fc": "mlp.fc_in", "down": "mlp.fc_out"}
        self.projection_paths = attention | {"o_proj": "attn.out_proj"} | mlp
        self.biased = frozenset(mlp)
        self.layer = self.parallel_branch_layer

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Add the head's bias."""
        return logits + self.source.get("lm_head.bias")


REFERENCE = GptJReference

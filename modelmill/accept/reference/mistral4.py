"""mistral4: latent attention (arXiv:2405.04434, 2.1), growing queries (the card of Small 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.deepseek import DeepseekReference
from modelmill.accept.reference.ministral3 import (
    attention_temperature_factors,
    read_attention_temperature,
)
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_SIZES = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 1048576,
}  # fmt: skip
DEFAULT_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ROTATED_SHARE_KEY = "partial_rotary_factor"


class Mistral4Reference(DeepseekReference):
    """Mistral4ForCausalLM; the rotated channels are those of qk_rope_head_dim."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        scaling = dict(
            config.get("rope_scaling") or config.get("rope_parameters") or DEFAULT_ROPE_PARAMETERS
        )
        scaling.pop(ROTATED_SHARE_KEY, None)
        super().__init__(source, DEFAULT_SIZES | config | {"rope_scaling": scaling})
        self.slope, self.trained = read_attention_temperature(config, scaling)

    def expert_scores(self, logits: Tensor) -> Tensor:
        """Return the experts' shares."""
        return logits.softmax(-1)

    def expert_selection_bias(self, index: int) -> Tensor:
        """Return nothing to add."""
        del index
        return torch.zeros(())

    def query_scaling_by_position(self, count: int) -> Tensor:
        """Return the factors of rotated queries, [count]."""
        factors = attention_temperature_factors(count, self.slope, self.trained)
        return torch.tensor(factors, dtype=self.dtype, device=self.device)


REFERENCE = Mistral4Reference

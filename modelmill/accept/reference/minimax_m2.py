"""minimax_m2: norms over all of q and of k, sigmoids over experts (the model card of MiniMax-M2).

The choice is made with a learned bias added to the scores; the weights are the scores of the
chosen, divided by their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.moe import MIXTRAL_EXPERT_MATRIX_NAMES, ExpertsMixin
from modelmill.accept.reference.olmo2 import Olmo2Reference
from modelmill.accept.reference.plain_decoder import NORM_PATHS
from modelmill.accept.reference.rope import ReferenceRope, partial_rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

SELECTION_BIAS_WEIGHT_KEY = "selection_bias"


class MiniMaxM2Reference(Olmo2Reference, ExpertsMixin):
    """MiniMaxM2ForCausalLM."""

    router_path = "block_sparse_moe.gate"
    experts_path = "block_sparse_moe.experts"
    expert_names = MIXTRAL_EXPERT_MATRIX_NAMES

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        sizes = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
        config = {**sizes, "max_position_embeddings": 196608, **config}
        if config.get("rotary_dim"):
            config.setdefault("partial_rotary_factor", config["rotary_dim"] / config["head_dim"])
        super().__init__(source, config)
        self.norm_paths, self.layer = dict(NORM_PATHS), self.pre_norm_layer
        self.biased = frozenset()

    def build_rope(self, *, theta: float = 5000000.0, **changes: Any) -> ReferenceRope:
        """Return the rotation of a part of each head, as a config changed so says."""
        return partial_rope_from_config(
            self.config | changes, self.head_dim, self.max_position, theta=theta
        )

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation of a part of each head."""
        return partial_rope_from_config(config, self.head_dim, length, theta=5000000.0)

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; that of q and k as the engine stores their channels."""
        affine = super().norm_weights(index, name)
        return self.to_engine_channel_order(affine) if name == "qk_norm" else affine

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's router with its bias, and the experts."""
        name = f"{self.LAYERS}.{index}.block_sparse_moe.e_score_correction_bias"
        return super().mlp_weights(index) | {
            SELECTION_BIAS_WEIGHT_KEY: ModuleWeights(self.source.get(name))
        }

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run the experts that the router chooses."""
        scores = r.linear("router", normed).sigmoid()
        ranked = (scores + r.weights[SELECTION_BIAS_WEIGHT_KEY].weight).tolist()
        routing = torch.zeros_like(scores)
        for token, row in enumerate(ranked):
            best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[: self.top_k]
            routing[token, best] = scores[token, best] / scores[token, best].sum()
        total = self.run_and_combine_experts(r, normed, routing, scores, self.run_expert)
        return r.record("mlp_out", total, normed)


REFERENCE = MiniMaxM2Reference

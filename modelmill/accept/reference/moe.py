"""mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe: experts in the place of the MLP.

The router is a softmax over all experts' logits, of which the ``top_k`` largest remain
(arXiv:1701.06538); their weights are divided by their sum, or not. Shared experts:
arXiv:2401.06066.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights, project
from modelmill.accept.reference.granite import GraniteReference
from modelmill.accept.reference.olmo2 import Olmo2Reference
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import (
    NORM_PATHS,
    PlainDecoderReference,
    reference_factory_by_model_type,
)
from modelmill.accept.reference.rope import ReferenceRope, rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
DEFAULT_MAX_POSITION_EMBEDDINGS = {
    "mixtral": 131072,
    "qwen2_moe": 32768,
    "qwen3_moe": 32768,
    "olmoe": 4096,
    "qwen3_next": 32768,
    "qwen3_5_moe_text": 32768,
}
DEFAULT_KV_HEADS = {"mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}
DEFAULT_ROPE_THETAS = {"mixtral": 1e6}
DEFAULT_NUM_EXPERTS_AND_TOP_K = {"mixtral": (8, 2), "qwen2_moe": (60, 4), "qwen3_moe": (128, 8),
                   "olmoe": (64, 8), "granitemoe": (8, 2), "qwen3_next": (512, 10),
                   "qwen3_5_moe_text": (256, 8), "granitemoehybrid": (8, 2),
                   "minimax_m2": (256, 8), "ernie4_5_moe": (64, 6), "flex_olmo": (7, 5),
                   "granitemoeshared": (8, 2), "hunyuan_v1_moe": (1, 1),
                   "phimoe": (16, 2), "mellum": (64, 8)}  # fmt: skip
QWEN_EXPERT_MATRIX_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERT_MATRIX_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


class ExpertsMixin(PlainDecoderReference):
    """A decoder whose layers have experts.

    Attributes:
        router_path: name of the router's matrix.
        experts_path: name of the list of experts.
        expert_names: names of an expert's matrices.
        shared_path: name of the shared expert; empty: there is none.
        renormalizes: whether the weights of a token's experts sum to 1.
    """

    router_path = "mlp.gate"
    experts_path = "mlp.experts"
    expert_names = QWEN_EXPERT_MATRIX_NAMES
    shared_path = ""
    renormalizes = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        model_type = str(config["model_type"])
        kv_heads = config.get("num_key_value_heads") or DEFAULT_KV_HEADS.get(model_type)
        super().__init__(source, config | {"num_key_value_heads": kv_heads})
        experts, top_k = DEFAULT_NUM_EXPERTS_AND_TOP_K[model_type]
        self.num_experts = int(
            config.get("num_experts") or config.get("num_local_experts") or experts
        )
        self.top_k = int(config.get("num_experts_per_tok") or top_k)
        positions = DEFAULT_MAX_POSITION_EMBEDDINGS.get(model_type, 2048)
        length = int(config.get("max_position_embeddings") or positions)
        theta = config.get("rope_theta") or DEFAULT_ROPE_THETAS.get(model_type, 1e4)
        self.rope = self.make_rope(config | {"rope_theta": theta}, length)
        only, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
        self.dense_layers = {
            i for i in range(self.num_layers) if i in only or (i + 1) % int(every) != 0
        }

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation."""
        return rope_from_config(config, self.head_dim, length)

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's router and experts."""
        if index in self.dense_layers:
            return super().mlp_weights(index)
        stem = f"{self.LAYERS}.{index}"
        weights = {"router": self.read_linear(f"{stem}.{self.router_path}", False)}
        for expert in range(self.num_experts):
            for name in self.expert_names:
                weights[f"experts.{expert}.{name}"] = self.read_expert_matrix(stem, expert, name)
        if self.shared_path:
            for name in QWEN_EXPERT_MATRIX_NAMES:
                weights[f"shared_expert.{name}"] = self.read_linear(
                    f"{stem}.{self.shared_path}.{name}_proj", False
                )
            gate = f"{stem}.{self.shared_path}_gate"
            weights["shared_expert_gate"] = self.read_linear(gate, False)
        return weights

    def read_expert_matrix(self, stem: str, expert: int, name: str) -> ModuleWeights:
        """Read one matrix of one expert."""
        return self.read_linear(
            f"{stem}.{self.experts_path}.{expert}.{self.expert_names[name]}", False
        )

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run the experts that the router chooses, and the shared one."""
        if "router" not in r.weights:
            return super().mlp(r, normed)
        probabilities = r.linear("router", normed).softmax(-1)
        routing = self.routing_weights(probabilities)
        total = self.run_and_combine_experts(r, normed, routing, probabilities, self.run_expert)
        if "shared_expert.gate" in r.weights:
            total = total + self.run_shared_expert(r, normed)
        return r.record("mlp_out", total, normed)

    def routing_weights(self, probabilities: Tensor) -> Tensor:
        """[T, E]: the weights of each token's experts, 0 for the others."""
        kept = torch.zeros_like(probabilities)
        for token, row in enumerate(probabilities):
            best = sorted(range(len(row)), key=lambda e: -float(row[e]))[: self.top_k]
            share = sum(row[e] for e in best) if self.renormalizes else 1.0
            for expert in best:
                kept[token, expert] = row[expert] / share
        return kept

    def run_expert(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        """Run a gated MLP whose weights begin with a name."""
        r.record(f"{name}.input", x)
        gate, up = r.linear(f"{name}.gate", x), r.linear(f"{name}.up", x)
        return r.linear(f"{name}.down", r.record(f"{name}.act", self.activation(gate) * up, gate))

    def run_shared_expert(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Run the expert that every token has, weighted by its gate."""
        out = self.run_expert(r, "shared_expert", x)
        weight = project(x, r.weights["shared_expert_gate"]).sigmoid()
        return r.record("shared_expert_gate", out * weight, x, out)


class MixtralReference(ExpertsMixin):
    """MixtralForCausalLM."""

    router_path = "block_sparse_moe.gate"
    experts_path = "block_sparse_moe.experts"
    expert_names = MIXTRAL_EXPERT_MATRIX_NAMES

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        self.windows = [config.get("sliding_window")] * self.num_layers


class QwenMoEReference(PerHeadQKNormMixin, ExpertsMixin):
    """Qwen2MoeForCausalLM and Qwen3MoeForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.renormalizes = bool(config.get("norm_topk_prob", False))
        self.is_qwen2 = config["model_type"] == "qwen2_moe"
        if self.is_qwen2:
            self.shared_path = "mlp.shared_expert"
            if config.get("qkv_bias", True):
                self.biased = frozenset("qkv")
        else:
            self.biased = self.projections_with_bias()
            self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        if config.get("use_sliding_window"):
            self.windows = [self._sliding_window_of(layer) for layer in range(self.num_layers)]

    def _sliding_window_of(self, layer: int) -> int | None:
        size = self.config.get("sliding_window", 4096)
        types = self.config.get("layer_types")
        if types and self.is_qwen2:
            return size if types[layer] == "sliding_attention" else None
        last = self.config.get("max_window_layers")
        below = layer % 2 == 0 and layer < (28 if last is None else last)
        return size if below or not self.is_qwen2 else None


class OlmoeReference(Olmo2Reference, ExpertsMixin):
    """OlmoeForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths = dict(NORM_PATHS)
        self.layer = self.pre_norm_layer
        length = int(
            config.get("max_position_embeddings") or DEFAULT_MAX_POSITION_EMBEDDINGS["olmoe"]
        )
        self.rope = rope_from_config(config, self.head_dim, length)
        self.renormalizes = bool(config.get("norm_topk_prob", False))
        self.qkv_bound = config.get("clip_qkv")


class GraniteMoeReference(GraniteReference, ExpertsMixin):
    """GraniteMoeForCausalLM: the matrices of all experts are stacked, gate above up."""

    router_path = "block_sparse_moe.router.layer"
    experts_path = "block_sparse_moe"

    def read_expert_matrix(self, stem: str, expert: int, name: str) -> ModuleWeights:
        """Read one matrix of one expert."""
        stacked = "output_linear" if name == "down" else "input_linear"
        rows = self.source.get(f"{stem}.{self.experts_path}.{stacked}.weight")[expert]
        if name != "down":
            gate, up = rows.chunk(2)
            rows = gate if name == "gate" else up
        return ModuleWeights(rows)


REFERENCE = reference_factory_by_model_type(
    {
        "mixtral": MixtralReference,
        "qwen2_moe": QwenMoEReference,
        "qwen3_moe": QwenMoEReference,
        "olmoe": OlmoeReference,
        "granitemoe": GraniteMoeReference,
    }
)

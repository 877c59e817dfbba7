"""nemotron_h: each layer is x + B(norm(x)) (arXiv:2504.03624, section 2.1).

B is Mamba2 (arXiv:2405.21060), attention without positions, an MLP of two matrices with the square
of ReLU (arXiv:2109.08668), or experts as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), each of
two such matrices, beside one that every token has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights
from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.mamba2 import Mamba2Mixin
from modelmill.accept.reference.plain_decoder import ATTENTION_LINEAR_NAMES, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "backbone."
LAYER_TYPE_BY_LETTER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
LAYER_TYPE_ALIASES = {"linear_attention": "mamba", "full_attention": "attention"}
FC_DOWN_MATRIX_NAMES = {"fc": "up_proj", "down": "down_proj"}


class NemotronHReference(Mamba2Mixin, GroupLimitedExpertsMixin):
    """NemotronHForCausalLM."""

    EMBEDDING = "backbone.embeddings.weight"
    FINAL_NORM = "backbone.norm_f"
    LAYERS = "backbone.layers"
    EPS_KEY = "layer_norm_epsilon"
    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, positions=4096)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        types = config.get("layers_block_type") or config.get("layer_types")
        types = types or [
            LAYER_TYPE_BY_LETTER[each] for each in config.get("hybrid_override_pattern") or "ME*-"
        ]
        self.kinds = [LAYER_TYPE_ALIASES.get(each, each) for each in types]
        experts = {
            "head_dim": config.get("head_dim") or config.get("attention_head_dim"),
            "num_hidden_layers": len(self.kinds),
            "num_attention_heads": config.get("num_attention_heads") or 32,
            "n_routed_experts": config.get("n_routed_experts") or 8,
            "num_experts_per_tok": config.get("num_experts_per_tok") or 2,
        }
        super().__init__(source, config | experts)
        self.activation = self.activation_from_config("mlp_hidden_act", "relu2")
        self.norm_paths = {"input_norm": "norm"}
        self.projection_paths = {name: f"mixer.{name}_proj" for name in "qkv"}
        self.projection_paths["o_proj"] = "mixer.o_proj"
        self.mlp_bias = bool(config.get("mlp_bias"))
        self.ssm_heads = int(config.get("mamba_num_heads", 128))
        self.ssm_dim = int(config.get("mamba_head_dim", 64))
        self.ssm_state = int(config.get("ssm_state_size", 128))
        self.ssm_groups = int(config.get("mamba_n_groups") or config.get("n_groups", 8))
        self.ssm_bias = bool(config.get("use_bias", False))
        self.conv_bias = bool(config.get("mamba_conv_bias", config.get("use_conv_bias", True)))
        self.layer = self.one_branch_layer

    @property
    def time_step_limits(self) -> tuple[float, float]:
        """Return the least and the largest Δ: any."""
        return 0.0, float("inf")

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's branch."""
        stem, kind = f"{self.LAYERS}.{index}.mixer", self.kinds[index]
        if kind == "mamba":
            return self.ssm_weights(stem)
        if kind == "attention":
            return self._read_projections(index, list(ATTENTION_LINEAR_NAMES))
        if kind == "mlp":
            return self._read_ungated_mlp_weights(stem, "", self.mlp_bias)
        weights = {"router": self.read_linear(f"{stem}.gate", False)}
        for number in range(self.num_experts):
            name = f"experts.{number}"
            weights |= self._read_ungated_mlp_weights(f"{stem}.{name}", f"{name}.", False)
        shared = self._read_ungated_mlp_weights(
            f"{stem}.shared_experts", "shared_expert.", self.mlp_bias
        )
        return weights | shared

    def _read_ungated_mlp_weights(self, stem: str, prefix: str, biased: bool) -> LayerWeights:
        return {
            f"{prefix}{name}": self.read_linear(f"{stem}.{matrix}", biased)
            for name, matrix in FC_DOWN_MATRIX_NAMES.items()
        }

    def expert_selection_bias(self, index: int) -> Tensor:
        """Return what is added to a layer's scores for the choice, [E]."""
        return self.source.get(f"{self.LAYERS}.{index}.mixer.gate.e_score_correction_bias")

    def run_expert(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        """Run the two matrices whose names begin so."""
        if name != "shared_expert":
            r.record(f"{name}.input", x)
        inner = r.linear(f"{name}.fc", x)
        return r.linear(f"{name}.down", r.record(f"{name}.act", self.activation(inner), inner))

    def run_experts(self, index: int, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run the experts that the router chooses, and the one of every token."""
        scores = self.expert_scores(r.linear("router", normed))
        bias = self.expert_selection_bias(index)
        routing = torch.stack([self._routing_weights_for_one_token(row, bias) for row in scores])
        total = self.run_and_combine_experts(r, normed, routing, scores, self.run_expert)
        return r.record("mlp_out", total + self.run_expert(r, "shared_expert", normed), normed)

    def one_branch_layer(self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int) -> None:
        """X + B(norm(x))."""
        normed, kind = self.apply_and_record_norm(r, "input_norm", x), self.kinds[index]
        if kind == "mamba":
            branch = self.run_ssm_mixer(r, normed)
        elif kind == "attention":
            branch = self.run_token_mixer(index, r, normed, prompt_length)
        elif kind == "mlp":
            branch = self.mlp(r, normed)
        else:
            branch = self.run_experts(index, r, normed)
        r.record("output", x + branch, x, branch)

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return those of multi-token prediction."""
        return {r"mtp\..*": "the layers of multi-token prediction"}


REFERENCE = NemotronHReference

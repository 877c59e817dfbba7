"""deepseek_v2, deepseek_v3, kimi_k2: latent attention (arXiv:2405.04434, 2.1, and 2412.19437).

Keys and values of all heads are expanded from the latent vectors here, as the papers define them.
YaRN multiplies the scores by the square of 0.1 · mscale_all_dim · ln(factor) + 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import (
    QUERY_ROWS_PER_BLOCK,
    LayerRecorder,
    LayerWeights,
    ModuleWeights,
    no_tf32,
    project,
    rms_norm,
)
from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.rope import rope_from_config, rotate_halves, rotate_interleaved
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
LATENT_EPS = 1e-6
LATENT_NORMS = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}


class DeepseekReference(GroupLimitedExpertsMixin):
    """DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.second = config["model_type"] == "deepseek_v2"
        self.rope_dim = self.config_int_or_default("qk_rope_head_dim", 64)
        self.nope_dim = self.config_int_or_default("qk_nope_head_dim", 128)
        self.value_dim = self.config_int_or_default("v_head_dim", 128)
        self.rank = self.config_int_or_default("kv_lora_rank", 512)
        self.query_rank = config.get("q_lora_rank", 1536)
        length = int(config.get("max_position_embeddings") or (2048 if self.second else 4096))
        self.rope = rope_from_config(config, self.rope_dim, length)
        self.score_scale = (self.nope_dim + self.rope_dim) ** -0.5
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if scaling.get("mscale_all_dim") and scaling.get("factor", 1) > 1:
            temper = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
            self.score_scale *= temper**2
        self.has_bias = bool(config.get("attention_bias"))
        interleaved = self.second or config.get("rope_interleave", True)
        self.turn = rotate_interleaved if interleaved else rotate_halves
        self._set_router_options()

    def _set_router_options(self) -> None:
        """Read the defaults of both, and DeepSeek-V2's choice of experts."""
        config = self.config
        if self.second:
            self.num_experts = self.config_int_or_default("n_routed_experts", 64)
            self.first_experts = int(config.get("first_k_dense_replace") or 0)
            self.renormalizes = False
            if config.get("topk_method") != "group_limited_greedy":
                self.groups = self.top_groups = 1
            return
        self.groups, self.top_groups = (
            self.config_int_or_default("n_group", 8),
            self.config_int_or_default("topk_group", 4),
        )
        self.routed_scale = float(config.get("routed_scaling_factor") or 2.5)
        if config.get("first_k_dense_replace") is None:
            self.first_experts = 3

    def expert_scores(self, logits: Tensor) -> Tensor:
        """Softmax in DeepSeek-V2."""
        return logits.softmax(-1) if self.second else super().expert_scores(logits)

    def expert_group_score(self, scores: list[float]) -> float:
        """The best expert's score in DeepSeek-V2."""
        return max(scores) if self.second else super().expert_group_score(scores)

    def expert_selection_bias(self, index: int) -> Tensor:
        """None in DeepSeek-V2."""
        return torch.zeros(()) if self.second else super().expert_selection_bias(index)

    def attention_projection_weights(self, index: int) -> LayerWeights:
        """Read the projections of attention and the norms of latent vectors."""
        stem = f"{self.LAYERS}.{index}.self_attn"
        both = self.read_linear(f"{stem}.kv_a_proj_with_mqa", self.has_bias)
        biases = (None, None) if both.bias is None else both.bias.tensor_split([self.rank])
        weights = {
            "kv_a": ModuleWeights(both.weight[: self.rank], biases[0]),
            "k_pe": ModuleWeights(both.weight[self.rank :], biases[1]),
            "kv_b": self.read_linear(f"{stem}.kv_b_proj", False),
            "o_proj": self.read_linear(f"{stem}.o_proj", self.has_bias),
            "kv_a_norm": self.norm_weights(index, "kv_a_norm"),
        }
        if self.query_rank is None:
            return weights | {"q": self.read_linear(f"{stem}.q_proj", False)}
        return weights | {
            "q_a": self.read_linear(f"{stem}.q_a_proj", self.has_bias),
            "q_a_norm": self.norm_weights(index, "q_a_norm"),
            "q": self.read_linear(f"{stem}.q_b_proj", False),
        }

    def to_engine_channel_order(self, affine: ModuleWeights) -> ModuleWeights:
        """Return the rows of q as they are stored."""
        return affine

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; those of latent vectors have their own names."""
        if name not in LATENT_NORMS:
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        return ModuleWeights(self.source.get(f"{stem}.{LATENT_NORMS[name]}.weight"))

    def run_norm(self, index: int | None, name: str, x: Tensor) -> Tensor:
        """Run the reference norm; behind the latent vector of keys the rotated ones pass by."""
        if name not in LATENT_NORMS:
            return super().run_norm(index, name, x)
        x, weights = x.to(self.device, self.dtype), self.norm_weights(index, name)
        width = len(weights.weight)
        return torch.cat((rms_norm(x[:, :width], weights, LATENT_EPS), x[:, width:]), dim=-1)

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention, keys and values expanded head by head."""
        del index
        count, x = len(normed), normed
        if self.query_rank is not None:
            x = r.linear("q_a", normed)
            x = r.record("q_a_norm", rms_norm(x, r.weights["q_a_norm"], LATENT_EPS), x)
        q = r.linear("q", x)
        latent, k_pe = r.linear("kv_a", normed), r.linear("k_pe", normed)
        latent = r.record("kv_a_norm", rms_norm(latent, r.weights["kv_a_norm"], LATENT_EPS), latent)
        heads = q.reshape(count, self.num_heads, -1)
        q_pe = self._apply_rotary(heads[..., self.nope_dim :], prompt_length)
        rotated_key = self._apply_rotary(k_pe[:, None], prompt_length)
        queries = torch.cat((heads[..., : self.nope_dim], q_pe), dim=-1)
        factors = self.query_scaling_by_position(count)
        if factors is not None:
            queries = queries * factors[:, None, None]
        r.record("q_rot", queries.reshape(count, -1), q)
        row = torch.cat((latent, rotated_key[:, 0]), dim=-1)
        r.record("latent_rot", row, latent, k_pe)
        rank, up_projection = latent.shape[1], r.weights["kv_b"]

        def attend(queries: Tensor, row: Tensor) -> Tensor:
            expanded = project(row[:, :rank], up_projection).reshape(count, self.num_heads, -1)
            keys, values = expanded[..., : self.nope_dim], expanded[..., self.nope_dim :]
            rotated = row[:, None, rank:].expand(-1, self.num_heads, -1)
            return self._causal_attention(queries, torch.cat((keys, rotated), dim=-1), values)

        return r.linear("o_proj", r.compute("attn", attend, queries, row))

    def _apply_rotary(self, x: Tensor, prompt_length: int) -> Tensor:
        assert self.rope is not None
        tables = self.rope.cos_sin(len(x), prompt_length, x.dtype)
        cos, sin = (table.to(x.device) for table in tables)
        return self.turn(x, cos, sin)

    def _causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of heads whose values have a size of their own."""
        count, column = len(q), torch.arange(len(q), device=q.device)
        out = q.new_empty(count, self.num_heads, self.value_dim)
        for start in range(0, count, QUERY_ROWS_PER_BLOCK):
            row = column[start : start + QUERY_ROWS_PER_BLOCK, None]
            for head in range(self.num_heads):
                with no_tf32():
                    scores = (
                        q[start : start + QUERY_ROWS_PER_BLOCK, head]
                        @ k[:, head].T
                        * self.score_scale
                    )
                    hidden = column[None] > row
                    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
                    out[start : start + QUERY_ROWS_PER_BLOCK, head] = weights @ v[:, head]
        return out.reshape(count, -1)


REFERENCE = DeepseekReference

"""llama, mistral, qwen2, qwen3: a pre-norm decoder with RMSNorm, RoPE and a gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import (
    ACTIVATIONS,
    Affine,
    LayerRecorder,
    LayerTrace,
    LayerWeights,
    ReferenceModel,
    causal_attention,
    rms_norm,
)
from modelmill.accept.reference.rope import ReferenceRope, apply_rope, rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NAME_PREFIX = "model."
# Defaults of the original configuration classes where config.json has no value.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class DecoderReference(ReferenceModel):
    """The plain decoder.

    A bias rule of None means: if the container has one (GGUF has no flag).
    """

    EMBEDDING = "model.embed_tokens.weight"
    FINAL_NORM = "model.norm.weight"

    def __init__(
        self, source: TensorSource, config: dict[str, Any], rope: ReferenceRope | None = None
    ) -> None:
        super().__init__(source, config)
        self.model_type = str(config["model_type"])
        self.hidden_size = int(config["hidden_size"])
        self.num_layers = int(config["num_hidden_layers"])
        self.num_heads = int(config["num_attention_heads"])
        self.num_kv_heads = int(
            config.get("num_key_value_heads", DEFAULT_KV_HEADS.get(self.model_type))
            or self.num_heads
        )
        plain_dim = 128 if self.model_type == "qwen3" else self.hidden_size // self.num_heads
        self.head_dim = int(config.get("head_dim") or plain_dim)
        if not config.get("is_causal", True) or config.get("use_bidirectional_attention"):
            raise UnknownArchitecture("attention to later tokens is not known here")
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.activation = ACTIVATIONS.get(str(config.get("hidden_act", "silu")))
        if self.activation is None:
            raise UnknownArchitecture(f"hidden_act {config['hidden_act']!r} is not known here")
        if rope is None:
            length = int(
                config.get("max_position_embeddings") or DEFAULT_MAX_POSITIONS[self.model_type]
            )
            rope = rope_from_config(config, self.head_dim, length)
        self.rope = rope
        self.has_bias = self._bias_rules()
        self.sliding_windows = [self._sliding_window(index) for index in range(self.num_layers)]

    def _bias_rules(self) -> dict[str, bool | None]:
        """Return module → has a bias.

        qwen2 has it on q, k, v always; the others as the config says.
        """
        attention, mlp = (
            self.config.get("attention_bias", False),
            self.config.get("mlp_bias", False),
        )
        if self.model_type == "mistral":
            attention = mlp = attention if attention is None else False
        qkv, out = (True, False) if self.model_type == "qwen2" else (attention, attention)
        if self.model_type in ("qwen2", "qwen3"):
            mlp = mlp if mlp is None else False
        rules = {"q": qkv, "k": qkv, "v": qkv, "o_proj": out, "gate": mlp, "up": mlp, "down": mlp}
        return {name: rule if rule is None else bool(rule) for name, rule in rules.items()}

    def _sliding_window(self, index: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None for full attention.

        A mistral with layer_types is what the originals call ministral: the list decides.
        """
        window = self.config.get("sliding_window", 4096)
        everywhere = self.model_type == "mistral"
        if self.model_type == "llama" or not (
            everywhere or self.config.get("use_sliding_window", False)
        ):
            return None
        layer_types = self.config.get("layer_types")
        if layer_types is not None:
            return window if layer_types[index] == "sliding_attention" else None
        return window if everywhere or index >= self.config.get("max_window_layers", 28) else None

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids."""
        return self.source.rows(self.EMBEDDING, ids)

    @property
    def is_tied(self) -> bool:
        """Return whether the output head shares the embedding's matrix."""
        return bool(self.config.get("tie_word_embeddings", False))

    def embedding_tables(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING}

    def apply_norm(self, x: Tensor, weights: Affine, eps: float) -> Tensor:
        """Apply the model's norm with these weights."""
        return rms_norm(x, weights, eps)

    def norm_weights(self, index: int | None, name: str) -> Affine:
        """Return weight and bias of a norm; index None: the final norm."""
        if index is None:
            return Affine(self.source.get(self.FINAL_NORM))
        return Affine(self.source.get(f"model.layers.{index}.{NORMS[name]}.weight"))

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        norms = ["input_norm", "mlp_norm"] + (
            ["q_norm", "k_norm"] if self.model_type == "qwen3" else []
        )
        weights = {name: self.norm_weights(index, name) for name in norms}
        for name, part in PROJECTIONS.items():
            stem = f"model.layers.{index}.{part}"
            rule = self.has_bias[name]
            biased = self.source.has(f"{stem}.bias") if rule is None else rule
            bias = self.source.get(f"{stem}.bias") if biased else None
            weights[name] = Affine(self.source.get(f"{stem}.weight"), bias)
        return weights

    def rope_for(self, prompt_length: int) -> ReferenceRope:
        """Return the rotary embedding for a prompt of this length."""
        # dynamic scaling is part of the tables; only Qwen v1 changes the rotation itself
        del prompt_length
        return self.rope

    def query_scale(self, count: int) -> Tensor:
        """Return [count]: factors of the rotated queries, by position."""
        return torch.ones(count, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor | None:
        """Return q [T, heads·dim] after QK norm and RoPE; None without QK norm."""
        if self.model_type != "qwen3":
            return None
        weights = {"q_norm": self.norm_weights(index, "q_norm")}
        return self._norm_and_rope(
            flat.to(self.device, self.dtype), weights, "q", flat.shape[0]
        ).reshape(flat.shape[0], -1)

    def _norm_and_rope(
        self, flat: Tensor, weights: LayerWeights, name: str, prompt_length: int
    ) -> Tensor:
        """Apply QK norm (if any) and RoPE to a projection [T, heads·dim]: [T, heads, dim]."""
        x = flat.reshape(flat.shape[0], -1, self.head_dim)
        norm = weights.get(f"{name}_norm")
        if norm is not None:
            x = rms_norm(x, norm, self.eps)
        # always computed on the CPU: the last bit of a frequency changes an angle
        cos, sin = self.rope_for(prompt_length).cos_sin(x.shape[0], prompt_length, x.dtype)
        turned = apply_rope(x, cos.to(x.device), sin.to(x.device))
        return turned * self.query_scale(x.shape[0])[:, None, None] if name == "q" else turned

    @torch.no_grad()
    def run_layer(
        self, index: int, weights: LayerWeights, x: Tensor, prompt_length: int
    ) -> LayerTrace:
        """Run one decoder layer."""
        recorder = LayerRecorder(weights)
        record, linear = recorder.record, recorder.linear
        assert self.activation is not None
        count = x.shape[0]
        normed = record("input_norm", rms_norm(x, weights["input_norm"], self.eps), x)
        q, k, v = (linear(name, normed) for name in ("q", "k", "v"))
        q_rot = self._norm_and_rope(q, weights, "q", prompt_length)
        k_rot = self._norm_and_rope(k, weights, "k", prompt_length)
        record("q_rot", q_rot.reshape(count, -1), q)
        record("k_rot", k_rot.reshape(count, -1), k)
        values = v.reshape(count, -1, self.head_dim)
        mixed = causal_attention(
            q_rot, k_rot, values, self.head_dim**-0.5, self.sliding_windows[index]
        )
        record("attn", mixed, recorder.trace["q_rot"].output, recorder.trace["k_rot"].output, v)
        attention = linear("o_proj", mixed)
        middle = record("post_attn_residual", x + attention, x, attention)
        normed = record("mlp_norm", rms_norm(middle, weights["mlp_norm"], self.eps), middle)
        gate, up = linear("gate", normed), linear("up", normed)
        act = record("act", self.activation(gate) * up, gate, up)
        down = linear("down", act)
        record("output", middle + down, middle, down)
        return recorder.trace

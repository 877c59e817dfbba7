"""gpt2: learned positions, LayerNorm, one fused qkv, tanh-GELU; projections stored [in, out]."""

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
    layer_norm,
)
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("gpt2",)
NAME_PREFIX = "transformer."
NORMS = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
PROJECTIONS = {"o_proj": "attn.c_proj", "fc": "mlp.c_fc", "down": "mlp.c_proj"}


class Gpt2Reference(ReferenceModel):
    """GPT2LMHeadModel.

    ``q_rot`` and ``k_rot`` are absent from its traces; ``fc`` stands for gate and up.
    """

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_layers = int(config.get("n_layer") or config["num_hidden_layers"])
        self.hidden_size = int(config.get("n_embd") or config["hidden_size"])
        self.num_heads = int(config.get("n_head") or config["num_attention_heads"])
        self.eps = float(config.get("layer_norm_epsilon", 1e-5))
        activation = str(config.get("activation_function", "gelu_new"))
        if activation not in ACTIVATIONS:
            raise UnknownArchitecture(f"activation_function {activation!r} is not known here")
        self.activation = ACTIVATIONS[activation]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids."""
        places = torch.arange(len(ids))
        tokens = self.source.rows("transformer.wte.weight", ids)
        return tokens + self.source.rows("transformer.wpe.weight", places)

    @property
    def is_tied(self) -> bool:
        """Return whether the output head shares the embedding's matrix."""
        return bool(self.config.get("tie_word_embeddings", True))

    def embedding_tables(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": "transformer.wte.weight", "positions": "transformer.wpe.weight"}

    def apply_norm(self, x: Tensor, weights: Affine, eps: float) -> Tensor:
        """Apply the model's norm with these weights."""
        return layer_norm(x, weights, eps)

    def norm_weights(self, index: int | None, name: str) -> Affine:
        """Return weight and bias of a norm; index None: the final norm."""
        stem = "transformer.ln_f" if index is None else f"transformer.h.{index}.{NORMS[name]}"
        return Affine(self.source.get(f"{stem}.weight"), self.source.get(f"{stem}.bias"))

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        get, stem = self.source.get, f"transformer.h.{index}"
        weights = {name: self.norm_weights(index, name) for name in NORMS}
        fused, bias = get(f"{stem}.attn.c_attn.weight").T, get(f"{stem}.attn.c_attn.bias")
        for part, name in enumerate(("q", "k", "v")):
            rows = slice(part * self.hidden_size, (part + 1) * self.hidden_size)
            weights[name] = Affine(fused[rows], bias[rows])
        for name, path in PROJECTIONS.items():
            weights[name] = Affine(get(f"{stem}.{path}.weight").T, get(f"{stem}.{path}.bias"))
        return weights

    def _score_scale(self, index: int) -> float:
        scale = 1.0
        if self.config.get("scale_attn_weights", True):
            scale = (self.hidden_size // self.num_heads) ** -0.5
        return scale / (index + 1) if self.config.get("scale_attn_by_inverse_layer_idx") else scale

    @torch.no_grad()
    def run_layer(
        self, index: int, weights: LayerWeights, x: Tensor, prompt_length: int
    ) -> LayerTrace:
        """Run one decoder layer."""
        del prompt_length  # learned positions do not depend on it
        recorder = LayerRecorder(weights)
        record, linear = recorder.record, recorder.linear
        normed = record("input_norm", layer_norm(x, weights["input_norm"], self.eps), x)
        q, k, v = (linear(name, normed) for name in ("q", "k", "v"))
        heads = [t.reshape(x.shape[0], self.num_heads, -1) for t in (q, k, v)]
        mixed = record(
            "attn",
            causal_attention(heads[0], heads[1], heads[2], self._score_scale(index)),
            q,
            k,
            v,
        )
        attention = linear("o_proj", mixed)
        middle = record("post_attn_residual", x + attention, x, attention)
        normed = record("mlp_norm", layer_norm(middle, weights["mlp_norm"], self.eps), middle)
        wide = linear("fc", normed)
        act = record("act", self.activation(wide), wide)
        down = linear("down", act)
        record("output", middle + down, middle, down)
        return recorder.trace

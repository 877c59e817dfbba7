"""Seeded decoder checkpoints with Gaussian or heavy-tailed weights, for measuring and for planting
faults.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def llama_layer_shapes(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a square-headed llama's layer, by their names below it."""
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "o")}
    shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    return shapes | {"mlp.down_proj": (hidden, inner)}


def seeded_decoder(
    layers: int = 2,
    hidden: int = 64,
    shape: str = "gauss",
    seed: int = 0,
    model_type: str = "llama",
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a square-headed llama.

    "heavy": Student's t with 3 degrees of freedom.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    def matrix(rows: int, columns: int) -> Tensor:
        plain = normal(rows, columns)
        if shape == "heavy":
            # t(3) = normal / √(χ²(3) / 3), of variance 3.
            chi = sum(normal(rows, columns).square() for _ in range(3))
            plain = plain / (chi / 3).sqrt() / 3**0.5
        return plain * columns**-0.5

    wide, heads, dim = 2 * hidden, hidden // 16, 16
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
    }
    tensors = {
        "model.embed_tokens.weight": normal(200, hidden),
        "lm_head.weight": 3 * matrix(200, hidden),
    }
    tensors["model.norm.weight"] = 1 + 0.2 * normal(hidden)
    for index in range(layers):
        stem = f"model.layers.{index}"
        for name, size in llama_layer_shapes(hidden, wide).items():
            tensors[f"{stem}.{name}.weight"] = matrix(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{name}.weight"] = 1 + 0.3 * normal(hidden)
    return tensors, config

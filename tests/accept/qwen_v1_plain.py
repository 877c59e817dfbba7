"""Qwen v1 a second time, deliberately otherwise: token by token with a growing cache, complex
rotation.

Nothing is shared with the reference under test; the weights come as a plain dict under the original
names.
Each token is one step: its key, already turned, joins the cache, and the query looks back over it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def seeded_qwen(config: dict[str, Any], seed: int) -> Tensors:
    """Seeded float32 weights in the QWenLMHeadModel layout, far enough from zero to tell things
    apart.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * spread

    hidden, half = config["hidden_size"], config["intermediate_size"] // 2
    wide = config["kv_channels"] * config["num_attention_heads"]
    tensors = {
        "transformer.wte.weight": normal(config["vocab_size"], hidden, spread=1.0),
        "transformer.ln_f.weight": 1 + normal(hidden, spread=0.2),
        "lm_head.weight": normal(config["vocab_size"], hidden, spread=0.3),
    }
    for i in range(config["num_hidden_layers"]):
        stem = f"transformer.h.{i}"
        tensors |= {
            f"{stem}.ln_1.weight": 1 + normal(hidden, spread=0.2),
            f"{stem}.ln_2.weight": 1 + normal(hidden, spread=0.2),
            f"{stem}.attn.c_attn.weight": normal(3 * wide, hidden, spread=1.5 * hidden**-0.5),
            f"{stem}.attn.c_attn.bias": normal(3 * wide, spread=0.3),
            f"{stem}.attn.c_proj.weight": normal(hidden, wide, spread=wide**-0.5),
            f"{stem}.mlp.w1.weight": normal(half, hidden, spread=hidden**-0.5),
            f"{stem}.mlp.w2.weight": normal(half, hidden, spread=hidden**-0.5),
            f"{stem}.mlp.c_proj.weight": normal(hidden, half, spread=half**-0.5),
        }
    return tensors


def ntk_alpha(prompt: int, seq_length: int) -> int:
    """1 up to seq_length, then 3, 7, 15, … for every doubling: counted, not computed by a
    logarithm.
    """
    doublings = 0
    while prompt > seq_length * 2**doublings:
        doublings += 1
    return 2 ** (doublings + 1) - 1


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of one vector."""
    length = math.sqrt(float((x * x).sum()) / x.numel() + eps)
    return x / length * weight


def rotate(head: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """One head's vector as complex numbers (channel i, channel i + d/2), each turned by its
    angle.
    """
    d = head.numel()
    numbers = torch.complex(head[: d // 2], head[d // 2 :])
    angles = torch.tensor(
        [position * base ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64
    )
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag))


class PlainQwen:
    """Steps through a sequence; the prompt's length is set once and fixes the rotation's base."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], prompt: int) -> None:
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = config
        d = config["kv_channels"]
        alpha = ntk_alpha(prompt, config["seq_length"]) if config["use_dynamic_ntk"] else 1
        self.base = config["rotary_emb_base"] * alpha ** (d / (d - 2))
        self.cache: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [] for _ in range(config["num_hidden_layers"])
        ]
        self.position = 0

    def step(self, token: int) -> torch.Tensor:
        """Logits [vocab] after this token."""
        x = self.tensors["transformer.wte.weight"][token]
        for i in range(self.config["num_hidden_layers"]):
            x = self.block(i, x)
        self.position += 1
        eps = self.config["layer_norm_epsilon"]
        return self.tensors["lm_head.weight"] @ norm(
            x, self.tensors["transformer.ln_f.weight"], eps
        )

    def block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        def weight(name: str) -> torch.Tensor:
            return self.tensors[f"transformer.h.{i}.{name}"]

        eps = self.config["layer_norm_epsilon"]
        fused = weight("attn.c_attn.weight") @ norm(x, weight("ln_1.weight"), eps) + weight(
            "attn.c_attn.bias"
        )
        x = x + weight("attn.c_proj.weight") @ self.attention(i, fused)
        h = norm(x, weight("ln_2.weight"), eps)
        gate = weight("mlp.w2.weight") @ h
        return x + weight("mlp.c_proj.weight") @ (
            (weight("mlp.w1.weight") @ h) * (gate / (1 + torch.exp(-gate)))
        )

    def attention(self, i: int, fused: torch.Tensor) -> torch.Tensor:
        d, heads = self.config["kv_channels"], self.config["num_attention_heads"]
        q, k, v = (part.reshape(heads, d) for part in fused.split(heads * d))
        keys = torch.stack([rotate(k[h], self.position, self.base) for h in range(heads)])
        self.cache[i].append((keys, v))
        mixed = []
        for h in range(heads):
            query = rotate(q[h], self.position, self.base)
            place = self.position + 1
            if self.config["use_logn_attn"] and place > self.config["seq_length"]:
                query = query * math.log(place, self.config["seq_length"])
            scores = torch.stack([past[h] for past, _ in self.cache[i]]) @ query / math.sqrt(d)
            chances = torch.exp(scores - scores.max())
            chances = chances / chances.sum()
            mixed.append(chances @ torch.stack([values[h] for _, values in self.cache[i]]))
        return torch.cat(mixed)


def plain_qwen_logits(
    tensors: Tensors, config: dict[str, Any], ids: list[int], prompt: int
) -> torch.Tensor:
    """Logits [T, vocab] of the whole sequence, its first ``prompt`` tokens being one request's
    prompt.
    """
    model = PlainQwen(tensors, config, prompt)
    return torch.stack([model.step(token) for token in ids])

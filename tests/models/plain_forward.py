"""A pre-norm decoder in float64, whole sequences at once, and seeded tensors for it.

It stands in for transformers where that has no class of a family; each family's entry says what
differs, from the paper or the published configuration. Nothing of modelmill is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.tiny_models import save_raw

Logits = Callable[..., Tensor]
"""(ids, decode_from=None) → [T, V]; decode_from: tokens beyond it are decoded one by one."""
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Frequencies = Callable[[int], Tensor]
"""The length that a position knows → radians per position, [rotated pairs]."""


def plain_frequencies(dim: int, base: float) -> Frequencies:
    """Unscaled rotation of ``dim`` channels."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return lambda length: base**-exponents


def dynamic_frequencies(dim: int, base: float, trained: int, factor: float | None) -> Frequencies:
    """NTK: the base grows with the length beyond the trained one; factor None: unscaled."""
    if factor is None:
        return plain_frequencies(dim, base)

    def frequencies(length: int) -> Tensor:
        growth = factor * max(length, trained) / trained - (factor - 1)
        return plain_frequencies(dim, base * growth ** (dim / (dim - 2)))(length)

    return frequencies


@dataclass(frozen=True)
class PlainModel:
    """Sizes, weights and switches.

    Attributes:
        qkv: The layer's q, k and v rows with biases or None, from its number.
        mlp: The layer's gate, up and down matrices.
        names: The checkpoint's names: embed, norm, head, layer (with a {}), and inside a layer
            input_norm, mlp_norm, out.
        slopes: ALiBi's, by head; None: rotation by ``frequencies``.
    """

    tensors: Tensors
    layers: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    names: Mapping[str, str]
    qkv: Callable[[int], list[tuple[Tensor, Tensor | None]]]
    mlp: Callable[[int], tuple[Tensor, Tensor, Tensor]]
    frequencies: Frequencies | None = None
    neighbours: bool = False
    slopes: Tensor | None = None
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    temperature: float = 1.0
    out_bias: bool = False
    mlp_bias: bool = False
    head: Callable[[Tensor], Tensor] = field(default=lambda rows: rows)
    tied: bool = False

    def get(self, name: str) -> Tensor:
        """A tensor in float64."""
        return self.tensors[name].double()

    @torch.no_grad()
    def logits(self, ids: list[int], decode_from: int | None = None) -> Tensor:
        """[T, V] float32."""
        prompt = len(ids) if decode_from is None else min(decode_from, len(ids))
        x = self.get(self.names["embed"])[ids] * self.embedding_scale
        for layer in range(self.layers):
            stem = self.names["layer"].format(layer)
            normed = self._norm(x, f"{stem}.{self.names['input_norm']}.weight")
            x = x + self.branch_scale * self._attention(layer, stem, normed, prompt)
            normed = self._norm(x, f"{stem}.{self.names['mlp_norm']}.weight")
            gate, up, down = (each.double() for each in self.mlp(layer))
            x = x + self.branch_scale * (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        x = self._norm(x, self.names["norm"])
        rows = self.get(self.names["embed" if self.tied else "head"])
        return (x @ self.head(rows).T * self.logit_scale).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.get(name)

    def _attention(self, layer: int, stem: str, x: Tensor, prompt: int) -> Tensor:
        q, k, v = (
            (x @ weight.double().T + (0 if bias is None else bias.double())).unflatten(
                -1, (-1, self.dim)
            )
            for weight, bias in self.qkv(layer)
        )
        if self.frequencies is not None:
            q, k = self._rotate(q, prompt), self._rotate(k, prompt)
        group = self.heads // self.kv_heads
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(self.dim)
        place = torch.arange(len(x))
        if self.slopes is not None:
            scores = scores + self.slopes.double()[:, None, None] * (place[None] - place[:, None])
        scores = scores.masked_fill(place[None] > place[:, None], -math.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        out = mixed @ self.get(f"{stem}.{self.names['out']}.weight").T
        return out + self.get(f"{stem}.{self.names['out']}.bias") if self.out_bias else out

    def _rotate(self, x: Tensor, prompt: int) -> Tensor:
        assert self.frequencies is not None
        known = [max(prompt, p + 1) for p in range(len(x))]
        angle = torch.stack([p * self.frequencies(length) for p, length in enumerate(known)])
        turn = torch.polar(torch.full_like(angle, self.temperature), angle)[:, None]
        count = 2 * angle.shape[1]
        part = x[..., :count]
        pairs = part.unflatten(-1, (-1, 2)) if self.neighbours else part.unflatten(-1, (2, -1))
        axis = -1 if self.neighbours else -2
        first, second = pairs.unbind(axis)
        turned = torch.complex(first, second) * turn
        both = torch.stack((turned.real, turned.imag), axis).flatten(-2)
        return torch.cat((both, x[..., count:]), -1)


def draw(shapes: Shapes) -> dict[str, Tensor]:
    """Seeded tensors; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            out[name] = values * 1.2 * shape[1] ** -0.5
        else:
            out[name] = 0.3 * values + float("norm" in name and name.endswith("weight"))
    return out


def save_drawn(folder: Path, shapes: Shapes, raw: dict[str, Any]) -> dict[str, Tensor]:
    """Write a seeded checkpoint; returns its tensors."""
    tensors = draw(shapes)
    save_raw(folder, tensors, raw)
    return tensors


LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "layer": "model.layers.{}", "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "out": "self_attn.o_proj",
}  # fmt: skip


def llama_shapes(raw: Mapping[str, Any], *, biased: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tensors of a checkpoint with LLaMA's names; biased: names with a bias."""
    hidden, inner, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    heads = raw["num_attention_heads"]
    kv = raw.get("num_key_value_heads", heads) * hidden // heads
    matrices = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes: dict[str, Any] = {LLAMA_NAMES["embed"]: (vocab, hidden)}
    for layer in range(raw["num_hidden_layers"]):
        stem = LLAMA_NAMES["layer"].format(layer)
        shapes |= {f"{stem}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{stem}.{name}.bias": matrices[name][:1] for name in biased}
        for norm in (LLAMA_NAMES["input_norm"], LLAMA_NAMES["mlp_norm"]):
            shapes[f"{stem}.{norm}.weight"] = (hidden,)
    shapes[LLAMA_NAMES["norm"]] = (hidden,)
    if not raw.get("tie_word_embeddings"):
        shapes[LLAMA_NAMES["head"]] = (vocab, hidden)
    return shapes


def llama_parts(raw: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The fields of ``PlainModel`` that LLaMA's names give."""
    heads = raw["num_attention_heads"]

    def matrix(layer: int, name: str) -> Tensor:
        return tensors[f"model.layers.{layer}.{name}.weight"]

    def qkv(layer: int) -> list[tuple[Tensor, Tensor | None]]:
        names = [f"self_attn.{part}_proj" for part in "qkv"]
        biases = [tensors.get(f"model.layers.{layer}.{name}.bias") for name in names]
        return [(matrix(layer, n), bias) for n, bias in zip(names, biases, strict=True)]

    return {
        "tensors": tensors,
        "layers": raw["num_hidden_layers"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads", heads),
        "dim": raw["hidden_size"] // heads,
        "eps": raw.get("rms_norm_eps", 1e-6),
        "names": LLAMA_NAMES,
        "qkv": qkv,
        "mlp": lambda layer: tuple(matrix(layer, f"mlp.{n}_proj") for n in ("gate", "up", "down")),
        "tied": bool(raw.get("tie_word_embeddings")),
    }

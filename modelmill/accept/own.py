"""Engines of few bits are judged in two halves, each sharper than both together.

Their arithmetic: the reference computes with the weights that the engine really holds, and rounds activations where the
engine does, so that every module is within the bounds of an unquantized engine (whole sequences too, where activations
are not rounded). Their weights: what is held, with a recipe's folded
scales undone, against the checkpoint's own, matrix by matrix: rounding moves single weights, but it neither turns a
matrix, nor swaps two, nor scales one; nor does it do so to a row or a tile (accept/parts.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.ends import dense_blocks
from modelmill.accept.metrics import Row, compare_tensors
from modelmill.accept.parts import compare_matrix
from modelmill.accept.reference import Affine, HeadTrace, LayerWeights, ModuleIO, Reference
from modelmill.accept.reference.dense import all_bits
from modelmill.accept.tolerances import PARTS, Bound, weight_bound

NORMS = {"input_norm": "attn_norm", "mlp_norm": "mlp_norm"}
# the engine's matrices: the reference's names for their rows, and the site that they read
LINEARS = {
    "attn.qkv_proj": (("q", "k", "v"), "qkv"),
    "attn.o_proj": (("o_proj",), "o"),
    "mlp.gate_up_proj": (("gate", "up"), "up"),
    "mlp.fc_proj": (("fc",), "up"),
    "mlp.down_proj": (("down",), "down"),
}
Scales = Mapping[str, Tensor]


def own_reference(reference: Reference, model: Any, kinds: Mapping[str, str]) -> Reference:
    """``reference`` computing with the norms (and the quantized head) that ``model`` holds; its layers: own_weights."""
    plain_norm = reference.norm_weights
    made = copy.copy(reference)

    def norm_weights(index: int | None, name: str) -> Affine:
        plain = plain_norm(index, name)
        return _same(_norm(model, index, name, made.device), plain) if index is not None and name in NORMS else plain

    def head(x: Tensor) -> HeadTrace:
        normed = made.run_norm(None, "final_norm", x.to(made.dtype))
        seen = _seen(model.head.held.to(str(made.device)))
        given = normed if seen is None else seen(normed)
        with all_bits():
            blocks = dense_blocks(model.head.held, made.device)
            logits = torch.cat([given @ block.to(made.dtype).T for block in blocks], -1)
        return {"final_norm": ModuleIO((x,), normed), "logits": ModuleIO((normed,), logits)}

    made.norm_weights = norm_weights  # type: ignore[method-assign]
    if kinds.get("head", "dense") != "dense":
        made.head = head  # type: ignore[method-assign]
    return made


def own_weights(plain: LayerWeights, held: LayerWeights) -> LayerWeights:
    """A layer's weights as the engine holds them, in the reference's dtype."""
    return plain | {name: _same(mine, plain[name]) for name, mine in held.items()}


def held_weights(model: Any, index: int, weights: LayerWeights) -> Iterator[tuple[str, Affine]]:
    """What a layer of the engine holds, by the reference's names, in float32 where ``weights`` lie."""
    layer, device = model.layers[index], weights["input_norm"].weight.device
    for name in NORMS:
        yield name, _norm(model, index, name, device)
    for path, (names, _) in LINEARS.items():
        if names[0] not in weights:
            continue
        linear = layer.get_submodule(path)
        held = linear.held.to(str(device))
        dense, seen = held.dense(), _seen(held)
        bias = None if linear.bias is None else linear.bias.float().to(device)
        first = 0
        for name in names:
            rows = slice(first, first + len(weights[name].weight))
            yield name, Affine(dense[rows], None if bias is None else bias[rows], seen)
            first = rows.stop


def weight_rows(
    weights: LayerWeights, held_by_name: LayerWeights, kinds: Mapping[str, str], dtype: str, scales: Scales, index: int,
    kv: Any,
) -> Iterator[tuple[str, str, Row, Bound]]:  # fmt: skip
    """(path, module, row, bound) of every tensor of a layer: what is held against what the checkpoint holds.

    scales: what a recipe folded in, by site. kv: the model's KVShape. Behind a quantized matrix stands its worst row
    and tile, as ``….weight.parts``.
    """
    places = {name: (path, site) for path, (names, site) in LINEARS.items() for name in names}
    for name, held in held_by_name.items():
        path, site = places.get(name, (NORMS.get(name, name), ""))
        kind = kinds.get(f"layers.{index}.{path}", "dense")
        several = name in places and len(LINEARS[path][0]) > 1
        module = f"{path.rpartition('.')[0]}.{name}_proj" if several else path
        where = f"layers.{index}.{module}.weight"
        right = weights[name].weight
        # smoothing makes columns of quiet channels smaller than a step: what is held is compared as it is multiplied
        smoothed = kind == "w8a8" and site in scales
        ours = unfolded(name, "" if smoothed else site, held, scales, kv)
        fits = ours.weight.shape == right.shape
        right = right * scales[site] if fits and smoothed else right
        if fits and kind in PARTS:
            whole, parts = compare_matrix(where, ours.weight, right)
            yield where, module, whole, weight_bound(dtype, kind)
            yield parts.name, module, parts, PARTS[kind]
        else:
            yield where, module, compare_tensors(where, ours.weight, right), weight_bound(dtype, kind)
        biases = ours.bias, weights[name].bias
        if fits and any(bias is not None for bias in biases):
            # one that is lost counts as what is computed without it
            mine, expected = (right.new_zeros(len(right)) if bias is None else bias for bias in biases)
            row = compare_tensors(f"layers.{index}.{module}.bias", mine, expected)
            yield row.name, module, row, weight_bound(dtype, "dense")


def unfolded(name: str, site: str, held: Affine, scales: Scales, kv: Any) -> Affine:
    """A weight without the scales that a recipe folded into it: rows that make a site's input, columns that read it."""
    weight, bias, _ = held
    made = {"input_norm": "qkv", "mlp_norm": "up", "v": "o", "up": "down"}.get(name)
    if made is not None and made in scales:
        factor = scales[made]
        if name == "v":  # one vector for all query heads of a KV head
            factor = factor.view(kv.kv_heads, -1, kv.head_dim)[:, 0].reshape(-1)
        weight = weight * (factor[:, None] if weight.dim() == 2 else factor)
        bias = None if bias is None else bias * factor
    return Affine(weight / scales[site] if site in scales else weight, bias)


def _norm(model: Any, index: int, name: str, device: torch.device) -> Affine:
    norm = getattr(model.layers[index], NORMS[name])
    bias = getattr(norm, "bias", None)
    return Affine(norm.weight.float().to(device), None if bias is None else bias.float().to(device))


def _same(held: Affine, like: Affine) -> Affine:
    """In the reference's dtype; another shape than the checkpoint's is left to be found by comparison."""
    if held.weight.shape != like.weight.shape:
        return like
    dtype = like.weight.dtype
    return Affine(held.weight.to(dtype), None if held.bias is None else held.bias.to(dtype), held.seen)


def _seen(held: Any) -> Callable[[Tensor], Tensor] | None:
    """What a weight's product makes of its input, where that is rounded."""
    return getattr(held, "seen", None)


def spoken(kinds: Mapping[str, str]) -> dict[str, str]:
    """How the language model's matrices are held; those of the eyes are judged by themselves (accept.pictures)."""
    return {name: kind for name, kind in kinds.items() if not name.startswith("reader.")}


def is_low_bit(kinds: Mapping[str, str]) -> bool:
    """Whether an engine is judged in two halves: it holds weights coarser than int8."""
    return bool(set(kinds.values()) - {"dense", "int8"})

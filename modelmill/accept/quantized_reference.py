"""Engines of few bits are judged in two halves, each sharper than both together.

Their arithmetic: the reference computes with the weights that the engine really holds, and rounds
activations where the engine does, so that every module is within the bounds of an unquantized
engine (whole sequences too, where activations are not rounded). Their weights: what is held, with a
recipe's folded
scales undone, against the checkpoint's own, matrix by matrix: rounding moves single weights, but it
neither turns a matrix, nor swaps two, nor scales one; nor does it do so to a row or a tile
(accept/blockwise.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.blockwise import compare_matrix
from modelmill.accept.embedding_and_head import dequantize_blocks
from modelmill.accept.metrics import ErrorMetrics, compare_tensors
from modelmill.accept.reference import Affine, HeadTrace, LayerWeights, ModuleIO, ReferenceModel
from modelmill.accept.reference.base import no_tf32
from modelmill.accept.tolerances import BLOCK_BOUNDS, ErrorBound, weight_bound

NORM_MODULES = {"input_norm": "attn_norm", "mlp_norm": "mlp_norm"}
# the engine's matrices: the reference's names for their rows, and the site that they read
LINEAR_MODULES = {
    "attn.qkv_proj": (("q", "k", "v"), "qkv"),
    "attn.o_proj": (("o_proj",), "o"),
    "mlp.gate_up_proj": (("gate", "up"), "up"),
    "mlp.fc_proj": (("fc",), "up"),
    "mlp.down_proj": (("down",), "down"),
}
Scales = Mapping[str, Tensor]


def quantized_reference(
    reference: ReferenceModel, model: Any, weight_formats: Mapping[str, str]
) -> ReferenceModel:
    """``reference`` computing with the norms (and the quantized head) that ``model`` holds; its
    layers: with_engine_weights.
    """
    plain_norm = reference.norm_weights
    made = copy.copy(reference)

    def norm_weights(index: int | None, name: str) -> Affine:
        plain = plain_norm(index, name)
        return (
            _cast_like(_norm_weights(model, index, name, made.device), plain)
            if index is not None and name in NORM_MODULES
            else plain
        )

    def head(x: Tensor) -> HeadTrace:
        normed = made.run_norm(None, "final_norm", x.to(made.dtype))
        fake_quantize = _input_quantizer(model.head.weight.to(str(made.device)))
        given = normed if fake_quantize is None else fake_quantize(normed)
        with no_tf32():
            blocks = dequantize_blocks(model.head.weight, made.device)
            logits = torch.cat([given @ block.to(made.dtype).T for block in blocks], -1)
        return {"final_norm": ModuleIO((x,), normed), "logits": ModuleIO((normed,), logits)}

    made.norm_weights = norm_weights  # type: ignore[method-assign]
    if weight_formats.get("head", "dense") != "dense":
        made.head = head  # type: ignore[method-assign]
    return made


def with_engine_weights(
    checkpoint_weights: LayerWeights, engine_weights: LayerWeights
) -> LayerWeights:
    """A layer's weights as the engine holds them, in the reference's dtype."""
    return checkpoint_weights | {
        name: _cast_like(mine, checkpoint_weights[name]) for name, mine in engine_weights.items()
    }


def read_engine_weights(
    model: Any, index: int, weights: LayerWeights
) -> Iterator[tuple[str, Affine]]:
    """What a layer of the engine holds, by the reference's names, in float32 where ``weights``
    lie.
    """
    layer, device = model.layers[index], weights["input_norm"].weight.device
    for name in NORM_MODULES:
        yield name, _norm_weights(model, index, name, device)
    for path, (names, _) in LINEAR_MODULES.items():
        if names[0] not in weights:
            continue
        linear = layer.get_submodule(path)
        weight = linear.weight.to(str(device))
        dense, fake_quantize = weight.dense(), _input_quantizer(weight)
        bias = None if linear.bias is None else linear.bias.float().to(device)
        first = 0
        for name in names:
            rows = slice(first, first + len(weights[name].weight))
            yield name, Affine(dense[rows], None if bias is None else bias[rows], fake_quantize)
            first = rows.stop


def compare_layer_weights(
    checkpoint_weights: LayerWeights, engine_weights: LayerWeights,
    weight_formats: Mapping[str, str], dtype: str,
    folded_scales: Scales, index: int, kv: Any,
) -> Iterator[tuple[str, str, ErrorMetrics, ErrorBound]]:  # fmt: skip
    """(path, module, row, bound) of every tensor of a layer: what is held against what the
    checkpoint holds.

    folded_scales: what a recipe folded in, by site. kv: the model's KVShape. Behind a quantized
    matrix stands its worst row and tile, as ``….weight.worst_block``.
    """
    places = {
        name: (path, site) for path, (names, site) in LINEAR_MODULES.items() for name in names
    }
    for name, engine_weight in engine_weights.items():
        path, site = places.get(name, (NORM_MODULES.get(name, name), ""))
        kind = weight_formats.get(f"layers.{index}.{path}", "dense")
        several = name in places and len(LINEAR_MODULES[path][0]) > 1
        module = f"{path.rpartition('.')[0]}.{name}_proj" if several else path
        where = f"layers.{index}.{module}.weight"
        right = checkpoint_weights[name].weight
        # smoothing makes columns of quiet channels smaller than a step: what is held is compared as
        # it is multiplied
        smoothed = kind == "w8a8" and site in folded_scales
        ours = unfold_scales(name, "" if smoothed else site, engine_weight, folded_scales, kv)
        fits = ours.weight.shape == right.shape
        right = right * folded_scales[site] if fits and smoothed else right
        if fits and kind in BLOCK_BOUNDS:
            whole, worst_block = compare_matrix(where, ours.weight, right)
            yield where, module, whole, weight_bound(dtype, kind)
            yield worst_block.name, module, worst_block, BLOCK_BOUNDS[kind]
        else:
            yield (
                where,
                module,
                compare_tensors(where, ours.weight, right),
                weight_bound(dtype, kind),
            )
        biases = ours.bias, checkpoint_weights[name].bias
        if fits and any(bias is not None for bias in biases):
            # one that is lost counts as what is computed without it
            mine, expected = (
                right.new_zeros(len(right)) if bias is None else bias for bias in biases
            )
            row = compare_tensors(f"layers.{index}.{module}.bias", mine, expected)
            yield row.name, module, row, weight_bound(dtype, "dense")


def unfold_scales(name: str, site: str, affine: Affine, scales: Scales, kv: Any) -> Affine:
    """A weight without the scales that a recipe folded into it: rows that make a site's input,
    columns that read it.
    """
    weight, bias, _ = affine
    made = {"input_norm": "qkv", "mlp_norm": "up", "v": "o", "up": "down"}.get(name)
    if made is not None and made in scales:
        factor = scales[made]
        if name == "v":  # one vector for all query heads of a KV head
            factor = factor.view(kv.kv_heads, -1, kv.head_dim)[:, 0].reshape(-1)
        weight = weight * (factor[:, None] if weight.dim() == 2 else factor)
        bias = None if bias is None else bias * factor
    return Affine(weight / scales[site] if site in scales else weight, bias)


def _norm_weights(model: Any, index: int, name: str, device: torch.device) -> Affine:
    norm = getattr(model.layers[index], NORM_MODULES[name])
    bias = getattr(norm, "bias", None)
    return Affine(norm.weight.float().to(device), None if bias is None else bias.float().to(device))


def _cast_like(affine: Affine, like: Affine) -> Affine:
    """In the reference's dtype; another shape than the checkpoint's is left to be found by
    comparison.
    """
    if affine.weight.shape != like.weight.shape:
        return like
    dtype = like.weight.dtype
    return Affine(
        affine.weight.to(dtype),
        None if affine.bias is None else affine.bias.to(dtype),
        affine.fake_quantize,
    )


def _input_quantizer(weight: Any) -> Callable[[Tensor], Tensor] | None:
    """What a weight's product makes of its input, where that is rounded."""
    return getattr(weight, "fake_quantize", None)


def language_formats(weight_formats: Mapping[str, str]) -> dict[str, str]:
    """How the language model's matrices are held; those of the vision encoder are judged by
    themselves (accept.vision_encoder).
    """
    return {
        name: kind
        for name, kind in weight_formats.items()
        if not name.startswith("image_embedder.")
    }


def is_low_bit(weight_formats: Mapping[str, str]) -> bool:
    """Whether an engine is judged in two halves: it holds weights coarser than int8."""
    return bool(set(weight_formats.values()) - {"dense", "int8"})

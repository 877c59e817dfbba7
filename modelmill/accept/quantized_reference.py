"""Splits the check of a low-bit engine into arithmetic and weights.

Arithmetic: the reference computes with the engine's weights and rounds activations where the engine
does, so that every module is within the bounds of an unquantized engine (whole sequences too, if
activations are not rounded). Weights: the stored weights, with a recipe's folded scales undone,
against the checkpoint's own, matrix by matrix: rounding changes single weights, but it does not
transpose, swap or scale a matrix; nor a row or a tile (accept/blockwise.py).
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
from modelmill.accept.tolerances import (
    ErrorBound,
    block_bound,
    scales_columns,
    weight_bound,
    whole_formats,
)

NORM_MODULES = {"input_norm": "attn_norm", "mlp_norm": "mlp_norm"}
# engine matrix → the reference's names for its rows, and the site that they read
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
    """Return ``reference`` with the norms (and the quantized head) of ``model``.

    For its layers see with_engine_weights.
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
        fake_quantize = input_quantizer(model.head.weight.to(str(made.device)))
        head_input = normed if fake_quantize is None else fake_quantize(normed)
        with no_tf32():
            blocks = dequantize_blocks(model.head.weight, made.device)
            logits = torch.cat([head_input @ block.to(made.dtype).T for block in blocks], -1)
        return {"final_norm": ModuleIO((x,), normed), "logits": ModuleIO((normed,), logits)}

    made.norm_weights = norm_weights  # type: ignore[method-assign]
    if weight_formats.get("head", "dense") != "dense":
        made.head = head  # type: ignore[method-assign]
    return made


def with_engine_weights(
    checkpoint_weights: LayerWeights, engine_weights: LayerWeights
) -> LayerWeights:
    """Return a layer's weights as the engine stores them, in the reference's dtype."""
    return checkpoint_weights | {
        name: _cast_like(engine_weight, checkpoint_weights[name])
        for name, engine_weight in engine_weights.items()
    }


def read_engine_weights(
    model: Any, index: int, weights: LayerWeights
) -> Iterator[tuple[str, Affine]]:
    """Return the weights of an engine's layer by the reference's names, in float32.

    They are on the device of ``weights``.
    """
    layer, device = model.layers[index], weights["input_norm"].weight.device
    for name in NORM_MODULES:
        yield name, _norm_weights(model, index, name, device)
    for path, (names, _) in LINEAR_MODULES.items():
        if names[0] not in weights:
            continue
        linear = layer.get_submodule(path)
        weight = linear.weight.to(str(device))
        dense, fake_quantize = weight.dense(), input_quantizer(weight)
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
    """Yield (path, module, row, bound) of every tensor of a layer, engine against checkpoint.

    folded_scales: the recipe's folded scales by site. kv: the model's KVShape. A quantized matrix
    is followed by its worst row and tile, as ``….weight.worst_block``.
    """
    places = {
        name: (path, site) for path, (names, site) in LINEAR_MODULES.items() for name in names
    }
    for name, engine_weight in engine_weights.items():
        path, site = places.get(name, (NORM_MODULES.get(name, name), ""))
        weight_format = weight_formats.get(f"layers.{index}.{path}", "dense")
        several = name in places and len(LINEAR_MODULES[path][0]) > 1
        module = f"{path.rpartition('.')[0]}.{name}_proj" if several else path
        where = f"layers.{index}.{module}.weight"
        right = checkpoint_weights[name].weight
        # where columns are scaled, the weights are compared as they are multiplied
        smoothed = scales_columns(weight_format) and site in folded_scales
        ours = unfold_scales(name, "" if smoothed else site, engine_weight, folded_scales, kv)
        fits = ours.weight.shape == right.shape
        right = right * folded_scales[site] if fits and smoothed else right
        blocks = block_bound(weight_format)
        if fits and blocks is not None:
            whole, worst_block = compare_matrix(where, ours.weight, right)
            yield where, module, whole, weight_bound(dtype, weight_format)
            yield worst_block.name, module, worst_block, blocks
        else:
            yield (
                where,
                module,
                compare_tensors(where, ours.weight, right),
                weight_bound(dtype, weight_format),
            )
        biases = ours.bias, checkpoint_weights[name].bias
        if fits and any(bias is not None for bias in biases):
            # a missing bias is compared as zeros
            actual, expected = (
                right.new_zeros(len(right)) if bias is None else bias for bias in biases
            )
            row = compare_tensors(f"layers.{index}.{module}.bias", actual, expected)
            yield row.name, module, row, weight_bound(dtype, "dense")


def unfold_scales(name: str, site: str, affine: Affine, scales: Scales, kv: Any) -> Affine:
    """Undo the scales that a recipe folded into a weight.

    They multiply the rows that produce a site's input and the columns that read it.
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
    """Cast to the reference's dtype; a wrong shape is found by the comparison."""
    if affine.weight.shape != like.weight.shape:
        return like
    dtype = like.weight.dtype
    return Affine(
        affine.weight.to(dtype),
        None if affine.bias is None else affine.bias.to(dtype),
        affine.fake_quantize,
    )


def input_quantizer(weight: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that rounds the input of a weight's product, if any."""
    return weight.fake_quantize if weight.QUANTIZES_INPUT else None


def language_formats(weight_formats: Mapping[str, str]) -> dict[str, str]:
    """Return the weight formats of the language model.

    Those of the vision encoder are checked separately (accept.vision_encoder).
    """
    return {
        name: weight_format
        for name, weight_format in weight_formats.items()
        if not name.startswith("image_embedder.")
    }


def is_low_bit(weight_formats: Mapping[str, str]) -> bool:
    """Return whether some weights are too coarse to check with the arithmetic, so: apart."""
    return bool(set(weight_formats.values()) - {"dense"} - whole_formats())

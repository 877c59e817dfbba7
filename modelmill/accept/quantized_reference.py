"""Splits the check of a low-bit engine into arithmetic and weights.

Arithmetic: the reference computes with the engine's weights and rounds activations where the engine
does, so that every module is within the bounds of an unquantized engine (whole sequences too, if
activations are not rounded). Weights: the stored weights, with a recipe's folded scales undone,
against the checkpoint's own, matrix by matrix: rounding changes single weights, but it does not
transpose, swap or scale a matrix; nor a row or a tile (accept/row_and_tile_errors.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.embedding_and_head import dequantize_row_blocks
from modelmill.accept.error_metrics import ErrorMetrics, compare_tensors
from modelmill.accept.output_gain import measure_quantized_output_gain
from modelmill.accept.reference import (
    LayerTrace,
    LayerWeights,
    ModuleWeights,
    ReferenceModel,
)
from modelmill.accept.reference.base import no_tf32
from modelmill.accept.row_and_tile_errors import compare_matrix
from modelmill.accept.tolerances import (
    ErrorBound,
    compares_with_folded_scales,
    formats_with_combined_tolerances,
    weight_bound,
    worst_block_bound,
)
from modelmill.nn.layer_spec import LayerSpec, NormSpec, ScaleFoldRows, layer_spec
from modelmill.nn.layer_stack import locate_module_in_stacks

Scales = Mapping[str, Tensor]


def reference_with_engine_norms_and_head(
    reference: ReferenceModel, model: Any, weight_formats: Mapping[str, str]
) -> ReferenceModel:
    """Return ``reference`` with the norms (and the quantized head) of ``model``.

    For its layers see override_with_engine_weights.
    """
    plain_norm = reference.norm_weights
    made = copy.copy(reference)

    def norm_weights(index: int | None, name: str) -> ModuleWeights:
        plain = plain_norm(index, name)
        if index is None:
            return plain
        layer = model.layers[index]
        paths = {
            norm.reference[0]: norm.path for norm in list_norms_with_weights(layer_spec(layer))
        }
        if name not in paths:
            return plain
        return _cast_weights_like(_read_engine_norm_weights(layer, paths[name], made.device), plain)

    def head_logits(normed: Tensor) -> Tensor:
        fake_quantize = input_fake_quantizer(model.head.weight.to(str(made.device)))
        head_input = normed if fake_quantize is None else fake_quantize(normed)
        with no_tf32():
            blocks = dequantize_row_blocks(model.head.weight, made.device)
            logits = torch.cat([head_input @ block.to(made.dtype).T for block in blocks], -1)
        return made.finish_logits(logits)

    made.norm_weights = norm_weights  # type: ignore[method-assign]
    if weight_formats.get("head", "dense") != "dense":
        made.head_logits = head_logits  # type: ignore[method-assign]
    return made


def override_with_engine_weights(
    checkpoint_weights: LayerWeights, engine_weights: LayerWeights
) -> LayerWeights:
    """Return a layer's weights as the engine stores them, in the reference's dtype."""
    return checkpoint_weights | {
        name: _cast_weights_like(engine_weight, checkpoint_weights[name])
        for name, engine_weight in engine_weights.items()
    }


def dequantize_engine_layer_weights(
    model: Any, index: int, weights: LayerWeights
) -> Iterator[tuple[str, ModuleWeights]]:
    """Return the weights of an engine's layer by the reference's names, in float32.

    They are on the device of ``weights``.
    """
    layer, device = model.layers[index], next(iter(weights.values())).weight.device
    spec = layer_spec(layer)
    _check_spec_declares_weights(spec, weights)
    for norm in list_norms_with_weights(spec):
        yield norm.reference[0], _read_engine_norm_weights(layer, norm.path, device)
    for each in spec.linears:
        linear = layer.get_submodule(each.path)
        weight = linear.weight.to(str(device))
        dense, fake_quantize = weight.dequantize(), input_fake_quantizer(weight)
        bias = None if linear.bias is None else linear.bias.float().to(device)
        first = 0
        for name in each.reference:
            rows = slice(first, first + len(weights[name].weight))
            yield (
                name,
                ModuleWeights(dense[rows], None if bias is None else bias[rows], fake_quantize),
            )
            first = rows.stop


def list_norms_with_weights(spec: LayerSpec) -> list[NormSpec]:
    """Return a layer's norms that have a weight."""
    return [norm for norm in spec.norms if norm.tensors]


def _check_spec_declares_weights(spec: LayerSpec, weights: LayerWeights) -> None:
    """Compare the reference's weights of a layer with its spec.

    Raises:
        ValueError: if no module declares a weight: it would not be compared.
    """
    compared = {name for m in spec.modules if m.reference for name in m.reference}
    inner = {tensor.partition(".")[0] for module in spec.modules for tensor in module.tensors}
    missing = weights.keys() - compared - inner
    if missing:
        raise ValueError(
            f"the reference has weights {', '.join(sorted(missing))}, which no module of the "
            "layer's spec names; declare them"
        )


def compare_layer_weights(
    checkpoint_weights: LayerWeights, engine_weights: LayerWeights,
    weight_formats: Mapping[str, str], dtype: str,
    folded_scales: Scales, index: int, spec: LayerSpec, traces: Sequence[LayerTrace] = (),
) -> Iterator[tuple[str, str, ErrorMetrics, ErrorBound]]:  # fmt: skip
    """Yield (path, module, row, bound) of every tensor of a layer, engine against checkpoint.

    folded_scales: the recipe's folded scales by site. spec: of the layer. traces: the checkpoint's
    activations of some sequences, on which the gain of outputs is measured. A quantized matrix is
    followed by its worst row and tile, as ``….weight.worst_block``.
    """
    places = {name: (each, each.site) for each in spec.linears for name in each.reference}
    norms = {norm.reference[0]: norm for norm in spec.norms}
    for name, engine_weight in engine_weights.items():
        module_spec, site = places.get(name) or (norms[name], "")
        path = module_spec.path
        weight_format = weight_formats.get(f"layers.{index}.{path}", "dense")
        several = name in places and len(module_spec.reference) > 1
        leaf = name.rpartition(".")[2]
        module = f"{path.rpartition('.')[0]}.{leaf}_proj" if several else path
        where = f"layers.{index}.{module}.weight"
        right = checkpoint_weights[name].weight
        # where columns are scaled, the weights are compared as they are multiplied
        smoothed = compares_with_folded_scales(weight_format) and site in folded_scales
        ours = undo_folded_scales(
            name, "" if smoothed else site, engine_weight, folded_scales, spec
        )
        fits = ours.weight.shape == right.shape
        right = right * folded_scales[site] if fits and smoothed else right
        blocks = worst_block_bound(weight_format)
        if fits and blocks is not None:
            whole, worst_block = compare_matrix(where, ours.weight, right)
            inputs = [trace[name].inputs[0] for trace in traces if name in trace]
            if smoothed:
                inputs = [x / folded_scales[site] for x in inputs]
            outputs = measure_quantized_output_gain(ours.weight, right, inputs)
            whole = replace(whole, output_gain=outputs.gain, output_gain_std=outputs.std)
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


def undo_folded_scales(
    name: str, site: str, affine: ModuleWeights, scales: Scales, spec: LayerSpec
) -> ModuleWeights:
    """Undo the scales that a recipe folded into a weight.

    They multiply the rows that produce a site's input and the columns that read it.
    """
    weight, bias, _ = affine
    for produced in scales:
        producer = spec.scale_fold_target(produced)
        factor = scales[produced]
        if isinstance(producer, ScaleFoldRows) and producer.part == name:
            if producer.groups is not None:  # one vector for all query heads of a KV head
                factor = producer.groups.reshape_by_group(factor)[:, 0].reshape(-1)
        elif not (isinstance(producer, NormSpec) and producer.reference[0] == name):
            continue
        weight = weight * (factor[:, None] if weight.dim() == 2 else factor)
        bias = None if bias is None else bias * factor
    return ModuleWeights(weight / scales[site] if site in scales else weight, bias)


def _read_engine_norm_weights(
    layer: torch.nn.Module, path: str, device: torch.device
) -> ModuleWeights:
    norm: Any = layer.get_submodule(path)
    bias = getattr(norm, "bias", None)
    return ModuleWeights(
        norm.weight.float().to(device), None if bias is None else bias.float().to(device)
    )


def _cast_weights_like(affine: ModuleWeights, like: ModuleWeights) -> ModuleWeights:
    """Cast to the reference's dtype; a wrong shape is found by the comparison."""
    if affine.weight.shape != like.weight.shape:
        return like
    dtype = like.weight.dtype
    return ModuleWeights(
        affine.weight.to(dtype),
        None if affine.bias is None else affine.bias.to(dtype),
        affine.fake_quantize,
    )


def input_fake_quantizer(weight: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that rounds the input of a weight's product, if any."""
    return weight.fake_quantize_input if weight.QUANTIZES_INPUT else None


def language_model_weight_formats(
    model: nn.Module, weight_formats: Mapping[str, str]
) -> dict[str, str]:
    """Return the weight formats of the language model.

    Those of the vision encoder are checked separately (accept.vision_encoder).
    """
    places = {name: locate_module_in_stacks(model, name) for name in weight_formats}
    read_images = {name for name, place in places.items() if place and place.stack.reads_images}
    return {name: each for name, each in weight_formats.items() if name not in read_images}


def needs_separate_weight_check(weight_formats: Mapping[str, str]) -> bool:
    """Return whether some weights are too coarse to check with the arithmetic, so: apart."""
    return bool(set(weight_formats.values()) - {"dense"} - formats_with_combined_tolerances())

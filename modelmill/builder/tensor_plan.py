"""The tensors of an engine: their sources in the checkpoint and their storage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from modelmill.builder.keep_quantized import KEEP, KeptWeight, find_kept_weight, source_shape
from modelmill.builder.segmentation import storage_dtype
from modelmill.checkpoint.container import list_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import ResolvedRule, Rule, plan_renames, result_info
from modelmill.core.config import BuildConfig
from modelmill.core.errors import TensorMismatch
from modelmill.nn.layer_spec import SiteSpec
from modelmill.nn.layer_stack import (
    DECODER_STACK,
    WEIGHT_FILE,
    LayerPlace,
    find_layer,
    module_site,
    weight_file,
)
from modelmill.nn.linear import Linear
from modelmill.quant.recipe import Recipe
from modelmill.quant.vision_encoder import W8A8NearestRecipe
from modelmill.weights.base import PackedInfo, packed_info

HEAD_MODULES = ("head",)  # quantized with the layers if the build says so


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the model: its source and its storage.

    Attributes:
        weight_format: of a linear's weight, None for everything else.
        stored_info: shape and dtype by full name.
        kept_weight: set if the checkpoint's own integers are stored.
        recipe: quantizes the tensor; None for one that is stored as it is.
        place: where its module is inside the model's layers; None outside.
        weight_file: the weight file that contains it.
    """

    module: str
    rule: ResolvedRule
    weight_format: str | None
    shape: tuple[int, ...]
    stored_info: PackedInfo
    kept_weight: KeptWeight | None = None
    recipe: Recipe | None = None
    place: LayerPlace | None = None
    weight_file: str = WEIGHT_FILE

    @property
    def decoder_layer(self) -> int | None:
        """Return the number of the decoder layer that has the tensor; None outside."""
        if self.place is None or self.place.stack != DECODER_STACK:
            return None
        return self.place.layer

    @property
    def nbytes(self) -> int:
        """Return the bytes in the engine."""
        return sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.stored_info.values()
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of a tensor that no recipe changes."""
        return next(iter(self.stored_info.values()))[1]


def resolve_rename_rules(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> list[ResolvedRule]:
    """Return the family's rules with this checkpoint's names.

    Raises:
        TensorMismatch: for missing and unused tensors.
    """
    rules = family.rules(model_config)
    drops = [
        *family.ignored_tensors(model_config),
        *map(re.escape, _unused_zero_biases(checkpoint, rules, family.CHECKPOINT_PREFIXES)),
    ]
    return plan_renames(rules, drops, checkpoint.names(), family.CHECKPOINT_PREFIXES)


def _unused_zero_biases(
    checkpoint: Checkpoint, rules: Sequence[Rule], prefixes: Sequence[str]
) -> list[str]:
    """Return unused biases of zeros: AutoGPTQ writes one for each packed matrix.

    Raises:
        TensorMismatch: if such a bias is not zero.
    """
    read = {source for rule in rules for source in rule.sources if source.endswith(".bias")}
    read |= {source.removeprefix(prefix) for source in read for prefix in prefixes}
    read |= {prefix + source for source in read for prefix in prefixes}
    here = set(checkpoint.names())
    biases = []
    for name in checkpoint.names():
        matrix = name.removesuffix("bias") + "weight"
        if (
            not name.endswith(".bias")
            or name in read
            or matrix not in here
            or checkpoint.quant_layout(matrix) is None
        ):
            continue
        if bool((checkpoint.get(name) != 0).any()):
            raise TensorMismatch(
                f"{list_names([name])} beside a packed matrix is a bias that "
                f"{checkpoint.model_type} has not, and not "
                "zero; does config.json belong to these weights (model_type, attention_bias)?"
            )
        biases.append(name)
    return biases


def quantized_modules(model: nn.Module, config: BuildConfig) -> set[str]:
    """Return the names of the linears that the build's recipes change."""
    options = {each for each in ("quantization", "tower") if getattr(config, each) != "none"}
    linears = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    places = {name: find_layer(model, name) for name in linears}
    quantized = {
        name for name, at in places.items() if at is not None and at.stack.recipe in options
    }
    heads = set(HEAD_MODULES) if config.quantize_head and "quantization" in options else set()
    return quantized | (linears & heads)


def plan_tensors(
    checkpoint: Checkpoint, config: BuildConfig, recipe: Recipe | None, model: nn.Module,
    rules: Sequence[ResolvedRule],
    family: ModuleType,
) -> list[PlannedTensor]:  # fmt: skip
    """Plan every tensor of the model.

    Raises:
        TensorMismatch: if the shape of a tensor differs from the config.
    """
    quantized = quantized_modules(model, config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    expected = {
        name: tuple(buffer.shape) for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    expected = {n: s for n, s in expected.items() if n.rpartition(".")[2] != "inv_freq"}
    expected |= {f"{name}.weight": module.shape for name, module in linears.items()}
    out = []
    for resolved in rules:
        module, _, suffix = resolved.target.rpartition(".")
        quantization: Recipe | str | None = None
        place = find_layer(model, module)
        if module in linears and suffix == "weight":
            quantization = "dense"
            if module in quantized and place is not None and place.stack.recipe == "tower":
                quantization = W8A8NearestRecipe(config)
            elif module in quantized:
                quantization = quantization_for(recipe, config, module, module_site(model, module))
        dtype = storage_dtype(family, resolved.target, getattr(torch, config.dtype))
        planned = plan_tensor(checkpoint, config, resolved, module, quantization, dtype)
        if planned.shape != expected[resolved.target]:
            raise TensorMismatch(
                f"{', '.join(resolved.sources)}: shape {list(planned.shape)} where the config "
                "asks for "
                f"{list(expected[resolved.target])}; config.json and weights do not belong together"
            )
        out.append(replace(planned, place=place, weight_file=weight_file(model, module)))
    return out


def quantization_for(
    recipe: Recipe | None, config: BuildConfig, module_path: str, site: SiteSpec | None = None
) -> Recipe | str:
    """Return how a linear's weight is quantized: the recipe, or "keep"."""
    if recipe is not None:
        return recipe.recipe_for(module_path, site)
    return KEEP if config.quantization == KEEP else "dense"


def plan_tensor(
    checkpoint: Checkpoint, config: BuildConfig, rule: ResolvedRule, module: str,
    quantization: Recipe | str | None,
    dtype: torch.dtype | None = None,
) -> PlannedTensor:  # fmt: skip
    """Plan one tensor; a matrix that cannot be kept becomes dense.

    quantization is "dense", "keep" or a recipe for a linear's weight, None for everything else.
    A dtype of None means the activations'.

    Raises:
        TensorMismatch: if the tensor contains integers.
    """
    info = result_info(rule, checkpoint.info)
    dtype = dtype or getattr(torch, config.dtype)
    if not info.torch_dtype.is_floating_point:
        raise TensorMismatch(
            f"{', '.join(rule.sources)} has dtype {info.dtype}; a floating-point dtype is required"
        )
    if quantization is None:
        return PlannedTensor(module, rule, None, info.shape, {rule.target: (info.shape, dtype)})
    shape = (info.shape[0], info.shape[1]) if len(info.shape) == 2 else (0, 0)
    if quantization == KEEP:
        kept = find_kept_weight(rule, checkpoint)
        if kept is not None:
            parts = tuple(
                source_shape(checkpoint.info(s), f)
                for s, f in zip(kept.sources, kept.layouts, strict=True)
            )
            stored = {
                f"{module}.{suffix}": entry
                for suffix, entry in kept.stored_info(parts, dtype).items()
            }
            return PlannedTensor(module, rule, kept.weight_format, info.shape, stored, kept)
        quantization = "dense"
    weight_format, layout = (
        (quantization, {})
        if isinstance(quantization, str)
        else (quantization.weight_format, quantization.pack_options)
    )
    stored = {
        f"{module}.{suffix}": entry
        for suffix, entry in packed_info(weight_format, shape, dtype, **layout).items()
    }
    recipe = None
    if not isinstance(quantization, str) and weight_format != "dense":
        recipe = quantization
    return PlannedTensor(module, rule, weight_format, info.shape, stored, recipe=recipe)

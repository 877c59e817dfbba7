"""The tensors of an engine: their sources in the checkpoint, how they are read and stored."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from modelmill.checkpoint.container import TensorInfo, format_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import (
    ResolvedRule,
    Rule,
    apply_rule,
    plan_renames,
    result_tensor_info,
)
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CorruptCheckpoint, TensorMismatch
from modelmill.core.model_family import checkpoint_tensor_rules, read_family_options
from modelmill.nn.layer_stack import (
    DECODER_STACK,
    NON_LAYER_WEIGHT_FILE,
    ModuleLocation,
    linear_quant_site,
    locate_module_in_stacks,
    module_weight_file,
)
from modelmill.nn.linear import Linear
from modelmill.quant.keep import KEEP_RECIPE_NAME, PrequantizedWeightPlan, plan_prequantized_weight
from modelmill.quant.recipe import Recipe
from modelmill.quant.vision_encoder import W8A8NearestRecipe
from modelmill.weights.base import PackedTensorSpecs, packed_tensor_specs

HEAD_MODULES = ("head",)  # quantized with the layers if the build says so
FINITE_CHECK_CHUNK_VALUES = 1 << 24
"""Values that are searched for NaN and infinity at a time."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the model: its source and its storage.

    Attributes:
        weight_format: of a linear's weight, None for everything else.
        stored_info: shape and dtype by full name.
        prequantized_weight: set if the checkpoint's own integers are stored.
        recipe: quantizes the weight; None: it is kept, or stored as it is.
        place: where its module is inside the model's layers; None outside.
        weight_file: the weight file that contains it.
    """

    module: str
    rule: ResolvedRule
    weight_format: str | None
    shape: tuple[int, ...]
    stored_info: PackedTensorSpecs
    prequantized_weight: PrequantizedWeightPlan | None = None
    recipe: Recipe | None = None
    place: ModuleLocation | None = None
    weight_file: str = NON_LAYER_WEIGHT_FILE

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

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Read the tensor: by suffix the parts of a kept matrix, else the one under "".

        dtype: of a kept matrix's dense parts.

        Raises:
            CorruptCheckpoint: if a value is NaN or infinite.
        """
        if self.prequantized_weight is not None:
            tensors = self.prequantized_weight.read(checkpoint, dtype).tensors()
        else:
            tensors = {"": apply_rule(self.rule, checkpoint.get, checkpoint.tensor_info)}
        for suffix, part in tensors.items():
            is_exponent = suffix == "scale" and part.dtype == torch.uint8  # MXFP4's E8M0
            values = part.view(torch.float8_e8m0fnu) if is_exponent else part
            check_finite(", ".join(self.rule.sources), values)
        return tensors

    def check_no_overflow(self, tensor: torch.Tensor) -> None:
        """Check a tensor that is about to be stored.

        Raises:
            CorruptCheckpoint: if a value overflowed in the dtype that it is stored in.
        """
        if not tensor.is_floating_point() or tensor.itemsize == 1 or _is_finite(tensor):
            return
        names, dtype = ", ".join(self.rule.sources), str(tensor.dtype).removeprefix("torch.")
        if self.weight_format not in (None, "dense"):
            raise CorruptCheckpoint(
                f"{names}: scales of {self.weight_format} overflow in {dtype}; build with -q "
                "int8 or none"
            )
        raise CorruptCheckpoint(
            f"{names} overflows in {dtype}; build with --dtype bfloat16 or float32"
        )


def resolve_rename_rules(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> list[ResolvedRule]:
    """Return the family's rules with this checkpoint's names.

    Raises:
        TensorMismatch: for missing and unused tensors.
    """
    tensors = checkpoint_tensor_rules(family)
    rules = tensors.rules(model_config)
    drops = [
        *tensors.ignored_tensors(model_config),
        *map(re.escape, _unused_zero_biases(checkpoint, rules, tensors.prefixes)),
    ]
    return plan_renames(rules, drops, checkpoint.names(), tensors.prefixes)


def is_bias_of_packed_matrix(checkpoint: Checkpoint, name: str, names: Collection[str]) -> bool:
    """Return whether a tensor is a bias beside a matrix of packed codes.

    Args:
        checkpoint: what has the tensor.
        name: of the tensor.
        names: of all tensors.
    """
    matrix = name.removesuffix("bias") + "weight"
    return (
        name.endswith(".bias") and matrix in names and checkpoint.quant_layout(matrix) is not None
    )


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
        if name in read or not is_bias_of_packed_matrix(checkpoint, name, here):
            continue
        if bool((checkpoint.get(name) != 0).any()):
            raise TensorMismatch(
                f"{format_names([name])} beside a packed matrix is a bias that "
                f"{checkpoint.model_type} has not, and not "
                "zero; does config.json belong to these weights (model_type, attention_bias)?"
            )
        biases.append(name)
    return biases


def quantized_modules(model: nn.Module, config: BuildConfig) -> set[str]:
    """Return the names of the linears that the build's recipes change."""
    options = {each for each in ("quantization", "tower") if getattr(config, each) != "none"}
    linears = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    places = {name: locate_module_in_stacks(model, name) for name in linears}
    quantized = {
        name for name, at in places.items() if at is not None and at.stack.recipe in options
    }
    heads = set(HEAD_MODULES) if config.quantize_head and "quantization" in options else set()
    return quantized | (linears & heads)


def model_tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a model needs, by the name of its rule's target."""
    shapes = {
        name: tuple(buffer.shape)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.rpartition(".")[2] != "inv_freq"
    }
    linears = ((n, module) for n, module in model.named_modules() if isinstance(module, Linear))
    return shapes | {f"{name}.weight": tuple(module.shape) for name, module in linears}


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
    expected = model_tensor_shapes(model)
    options, build_dtype = read_family_options(family), getattr(torch, config.dtype)
    out = []
    for rule in rules:
        module, _, suffix = rule.target.rpartition(".")
        place = locate_module_in_stacks(model, module)
        dtype = torch.float32 if options.is_kept_in_float32(rule.target) else build_dtype
        if module not in linears or suffix != "weight":
            planned = _plan_non_linear_tensor(checkpoint, rule, module, dtype)
        elif module not in quantized:
            planned = plan_linear_weight(checkpoint, rule, module, dtype, None)
        elif place is not None and place.stack.recipe == "tower":
            planned = plan_linear_weight(checkpoint, rule, module, dtype, W8A8NearestRecipe(config))
        else:
            own = (
                None
                if recipe is None
                else recipe.module_recipe(module, linear_quant_site(model, module))
            )
            keep = config.quantization == KEEP_RECIPE_NAME
            planned = plan_linear_weight(checkpoint, rule, module, dtype, own, keep=keep)
        if planned.shape != expected[rule.target]:
            raise TensorMismatch(
                shape_mismatch_message(rule.sources, planned.shape, expected[rule.target])
            )
        out.append(replace(planned, place=place, weight_file=module_weight_file(model, module)))
    return out


def shape_mismatch_message(
    sources: Sequence[str], shape: Sequence[int], expected: Sequence[int]
) -> str:
    """Describe a tensor that has another shape than the config asks for."""
    return (
        f"{', '.join(sources)}: shape {list(shape)} where the config asks for {list(expected)}; "
        "config.json and weights do not belong together"
    )


def plan_linear_weight(
    checkpoint: Checkpoint,
    rule: ResolvedRule,
    module: str,
    dtype: torch.dtype,
    recipe: Recipe | None,
    *,
    keep: bool = False,
) -> PlannedTensor:
    """Plan a linear's weight: kept, quantized or dense; no other place decides it.

    Args:
        checkpoint: has the weight's sources.
        rule: makes the weight from them.
        module: the linear.
        dtype: of the activations.
        recipe: quantizes it; None: it is dense.
        keep: whether the checkpoint's integers are stored, if it has any.

    Raises:
        TensorMismatch: if the weight contains integers.
    """
    info = _require_floating_result(checkpoint, rule)
    kept = plan_prequantized_weight(rule, checkpoint) if keep else None
    if kept is not None:
        weight_format, stored = kept.weight_format, kept.stored_tensor_specs(checkpoint, dtype)
    else:
        weight_format = "dense" if recipe is None else recipe.weight_format
        layout = {} if recipe is None else recipe.pack_options
        shape = (info.shape[0], info.shape[1]) if len(info.shape) == 2 else (0, 0)
        stored = packed_tensor_specs(weight_format, shape, dtype, **layout)
    return PlannedTensor(
        module,
        rule,
        weight_format,
        info.shape,
        {f"{module}.{suffix}": entry for suffix, entry in stored.items()},
        kept,
        None if weight_format == "dense" else recipe,
    )


def _plan_non_linear_tensor(
    checkpoint: Checkpoint, rule: ResolvedRule, module: str, dtype: torch.dtype
) -> PlannedTensor:
    """Plan a tensor that is no linear's weight."""
    shape = _require_floating_result(checkpoint, rule).shape
    return PlannedTensor(module, rule, None, shape, {rule.target: (shape, dtype)})


def _require_floating_result(checkpoint: Checkpoint, rule: ResolvedRule) -> TensorInfo:
    """Return what a rule makes; raises TensorMismatch if it contains integers."""
    info = result_tensor_info(rule, checkpoint.tensor_info)
    if not info.decoded_dtype.is_floating_point:
        raise TensorMismatch(
            f"{', '.join(rule.sources)} has dtype {info.dtype}; a floating-point dtype is required"
        )
    return info


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise CorruptCheckpoint naming the tensor if any value is NaN or infinite.

    Any shape and dtype; integers pass. It takes one pass and no memory of the tensor's size (float8
    is converted a chunk at a time).
    """
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), FINITE_CHECK_CHUNK_VALUES):
        part = flat[start : start + FINITE_CHECK_CHUNK_VALUES]
        if part.dtype.itemsize == 1:
            part = part.float()
        if _is_finite(part):
            continue
        low, high = torch.aminmax(part)
        problem = "NaN" if torch.isnan(low) or torch.isnan(high) else "infinity"
        raise CorruptCheckpoint(
            f"the tensor {name} holds {problem}; the checkpoint is damaged or was saved from a "
            "failed run"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a floating tensor is finite, in one pass without a copy."""
    if tensor.numel() == 0:
        return True
    # NaN propagates through aminmax and infinity is an extreme, so the two extremes are sufficient.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))

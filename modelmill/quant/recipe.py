"""The contract of a quantization recipe: the folder is the registry, a recipe is a file with
``RECIPE``, its class.

A recipe says what it needs to know about a layer's inputs, may change the layer before it is
rounded (``prepare``: what is folded from one matrix into another), and turns each weight into a
quantized one (``quantize``). Layers are handed to it one after another, from the first to the last,
and inside a layer the sites in the order of computation, so that statistics are those of inputs
which the quantized part before has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.registry import find_module, module_names
from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.weights.base import WeightFormat

NONE = "none"
KEEP = "keep"  # no recipe either: what the checkpoint has quantized stays so
AUTO = "auto"  # one for each layer (mixed_precision)
Scales = dict[str, torch.Tensor]


@dataclass
class InputStatistics:
    """Of the inputs x [T, K] at one site, over all calibration tokens; float32.

    hessian: [K, K], the mean of xᵀx. mean_abs, max_abs, min_values, max_values: [K]. input_samples:
    [R, K], every so many of the inputs.
    """

    num_tokens: int
    hessian: torch.Tensor
    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    min_values: torch.Tensor
    max_values: torch.Tensor
    input_samples: torch.Tensor


@dataclass
class PrepareResult:
    """What ``prepare`` did. scales: site → [K], what the inputs at that site were divided by.
    facts: for the report.

    quantize_by_site: site → what quantizes its weight in place of the recipe's own ``quantize``.
    """

    scales: Scales = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    quantize_by_site: dict[str, Callable[[torch.Tensor, InputStatistics | None], WeightFormat]] = (
        field(default_factory=dict)
    )


class Recipe(Protocol):
    """weight_format: how weights are held. pack_options: the format's options
    (``weights.base.pack``), which decide sizes.

    needs_calibration: whether ``quantize`` needs statistics. needs_prepare: whether ``prepare``
    does, of the layer as it was. A recipe that tries a layer out has ``needs_search`` (True) and
    ``search_layer(block, statistics, calibration, dtype)``, called in place of ``prepare`` with
    some calibration tokens before the layer; one that asks for no Hessian says ``needs_hessian``
    (False).
    """

    weight_format: str
    pack_options: Mapping[str, Any]
    needs_calibration: bool
    needs_prepare: bool

    def prepare(
        self, block: QuantizableLayer, statistics: Mapping[str, InputStatistics], dtype: torch.dtype
    ) -> PrepareResult:
        """Change the layer's dense weights, norms and biases in place, so that it computes the
        same.

        dtype: what norms and biases are stored in.
        """

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:
        """A weight [N, K] float32 as it will be held.

        statistics: of its inputs; None where there are none.
        """


def make_recipe(config: BuildConfig) -> Recipe | None:
    """The recipe of a build; None for "none" and "keep".

    Raises UsageError for one that is not known, or options it has not.
    """
    if config.quantization in (NONE, KEEP):
        return None
    made = _recipe_class(config.quantization)
    if made is None:
        raise UsageError(
            f"--quantization {config.quantization!r} is not one of {', '.join(recipe_names())}"
        )
    found: Recipe = made(config)
    return found


def recipe_names() -> list[str]:
    """Names of all recipes."""
    return [
        NONE,
        KEEP,
        AUTO,
        *(name for name in module_names("modelmill.quant") if _recipe_class(name) is not None),
    ]


def _recipe_class(name: str) -> Any:
    """The ``RECIPE`` of a file of this folder; None where it has none."""
    module = None if name == "recipe" else find_module("modelmill.quant", name)
    return getattr(module, "RECIPE", None)

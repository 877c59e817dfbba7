"""The interface of a quantization recipe: a file of this folder with a class ``RECIPE``.

A recipe declares which statistics of a layer's inputs it uses, may change the layer before it is
rounded (``prepare_layer``: scales folded from one matrix into another), and quantizes each weight
(``quantize``). Layers are processed one after another, from the first to the last, and inside a
layer the sites in the order of computation, so that the statistics are those of inputs computed by
the quantized part before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.core.recipe_declaration import read_recipe_declarations, rounding_method_hint
from modelmill.nn.layer_spec import QuantSiteSpec
from modelmill.quant.calibration_state import CalibrationState, QuantizableLayer
from modelmill.weights.base import WeightFormat

NO_RECIPE = "none"
Scales = dict[str, torch.Tensor]


@dataclass
class InputStatistics:
    """Statistics of the inputs x [T, K] at one site over all calibration tokens; float32.

    Attributes:
        hessian: [K, K], the mean of xᵀx.
        mean_abs: [K], as max_abs, min_values and max_values.
        input_samples: [R, K], evenly spaced rows of the inputs.
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
    """The result of ``prepare_layer``.

    Attributes:
        scales: site → [K], what the inputs at that site were divided by.
        facts: for the report.
        quantize_by_site: site → function that quantizes its weight instead of the recipe's
            ``quantize``.
    """

    scales: Scales = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    quantize_by_site: dict[str, Callable[[torch.Tensor, InputStatistics | None], WeightFormat]] = (
        field(default_factory=dict)
    )


class Recipe(ABC):
    """A way to quantize the layers of a model.

    What a recipe does not need keeps the default of this class.

    Attributes:
        weight_format: format of the quantized weights.
        pack_options: the format's options (``weights.base.pack``), which determine sizes.
        method: rounding method, for the report.
        needs_calibration: whether ``quantize`` needs statistics.
        needs_prepare: whether ``prepare_layer`` needs statistics of the unchanged layer.
        needs_hessian: whether the statistics need the Hessian, which takes most of their time.
        needs_search: whether ``prepare_layer_by_search`` is called instead of ``prepare_layer``.
    """

    weight_format: str
    pack_options: Mapping[str, Any] = MappingProxyType({})
    method: str = "nearest"
    needs_calibration: bool = False
    needs_prepare: bool = False
    needs_hessian: bool = True
    needs_search: bool = False

    def resolve_options(self, config: BuildConfig) -> tuple[dict[str, Any], dict[str, str]]:  # noqa: ARG002  no own "auto"
        """Return the values of own options that are not set, and the reason for each value."""
        return {}, {}

    def prepare_layer(
        self,
        block: QuantizableLayer,  # noqa: ARG002
        statistics: Mapping[str, InputStatistics],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> PrepareResult:
        """Change the layer's dense weights, norms and biases in place; its function stays the same.

        dtype: dtype in which norms and biases are stored.
        """
        return PrepareResult()

    def prepare_layer_by_search(
        self,
        block: QuantizableLayer,
        statistics: Mapping[str, InputStatistics],
        calibration: CalibrationState,  # noqa: ARG002
        dtype: torch.dtype,
    ) -> PrepareResult:
        """Prepare the layer by trying it out.

        calibration: some calibration tokens before the layer.
        """
        return self.prepare_layer(block, statistics, dtype)

    def module_recipe(self, module_path: str, site: QuantSiteSpec | None = None) -> Recipe:  # noqa: ARG002  one recipe for all modules
        """Return the recipe of a linear module by its name, or of a layer ("layers.3.").

        site: what a linear module inside a layer reads.
        """
        return self

    @abstractmethod
    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:
        """Quantize a weight [N, K] float32.

        statistics: of its inputs; None without calibration.
        """


def make_recipe(config: BuildConfig) -> Recipe | None:
    """Return the recipe of a build; None if its file has no ``RECIPE``, and for "none".

    Raises:
        UsageError: if the recipe does not exist or does not support an option.
    """
    name = config.quantization
    if name not in recipe_names():
        known = ", ".join(recipe_names())
        hint = rounding_method_hint(name)
        raise UsageError(f"--quantization {name!r} is not one of {known}{hint}")
    module = import_module_if_exists("modelmill.quant", name)
    cls: Callable[[BuildConfig], Recipe] | None = vars(module).get("RECIPE") if module else None
    return None if cls is None else cls(config)


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return [NO_RECIPE, *read_recipe_declarations()]

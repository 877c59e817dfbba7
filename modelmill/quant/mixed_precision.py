"""A bit choice per layer: int4 of some group size, int8, or unquantized.

``-q auto`` chooses them, ``--layer-recipe`` sets them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    RecipeDeclaration,
    RecipeOption,
)
from modelmill.nn.layer_spec import QuantSiteSpec
from modelmill.quant.bit_allocation import BIT_CHOICES, UNQUANTIZED_CHOICE
from modelmill.quant.int4 import Int4Recipe as Int4
from modelmill.quant.int8 import Int8Recipe as Int8
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.weights.base import WeightFormat
from modelmill.weights.dense import DenseWeight as Dense

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=99,
    name="auto",
    weight_format="int4",
    docs=(
        "a form for each layer",
        "a limit is given instead of a form: `--max-kl`, `--max-ppl-increase`",
    ),
    options={
        "max_kl": RecipeOption(
            None,
            "limit for auto: mean KL divergence from the unquantized model, in nats per token",
            type="float | None",
            above=0,
        ),
        "max_ppl_increase": RecipeOption(
            None,
            "limit for auto: increase of the perplexity in per cent",
            type="float | None",
            above=0,
        ),
    },
    reads=("method",),
)


class UnquantizedRecipe(Recipe):
    """Leaves a layer unquantized, in its storage dtype."""

    weight_format = "dense"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:  # noqa: ARG002
        """Return the weight in float32, rounded to its storage dtype."""
        return Dense(weight.to(self.dtype).float())


class MixedPrecisionRecipe(Recipe):
    """Recipes by layer number; a quantized head is int8."""

    weight_format = "int4"

    def __init__(self, config: BuildConfig, num_layers: int) -> None:
        """Check the layers and bit choices.

        Raises:
            UsageError: if a layer or a bit choice does not exist.
        """
        forms = {str(i): UNQUANTIZED_CHOICE for i in range(num_layers)} | dict(config.layer_recipes)
        for layer, form in forms.items():
            if not (layer.isdigit() and int(layer) < num_layers):
                raise UsageError(
                    f"--layer-recipe {layer}={form}: the layers are 0 to {num_layers - 1}"
                )
            if form not in (*BIT_CHOICES, UNQUANTIZED_CHOICE):
                raise UsageError(
                    f"--layer-recipe {layer}={form}: {form} is not one of "
                    f"{', '.join(BIT_CHOICES)}, {UNQUANTIZED_CHOICE}"
                )
        made = {form: _recipe_for_bit_choice(form, config) for form in sorted(set(forms.values()))}
        self.bit_choices = {int(layer): form for layer, form in forms.items()}
        self._recipes = {layer: made[form] for layer, form in self.bit_choices.items()}
        self._head_recipe = Int8(config)
        self.needs_calibration = any(recipe.needs_calibration for recipe in made.values())
        methods = {recipe.method for recipe in made.values() if isinstance(recipe, Int4)}
        self.method = methods.pop() if methods else "nearest"

    def module_recipe(self, module_path: str, site: QuantSiteSpec | None = None) -> Recipe:  # noqa: ARG002  all sites of a layer alike
        """Return the recipe of a linear module by its name in the model."""
        parts = module_path.split(".")
        return self._recipes[int(parts[1])] if parts[0] == "layers" else self._head_recipe

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:
        """Quantize the head; the recipes of the layers have their own ``quantize``."""
        return self._head_recipe.quantize(weight, statistics)


def _recipe_for_bit_choice(bit_choice: str, config: BuildConfig) -> Recipe:
    if bit_choice == UNQUANTIZED_CHOICE:
        return UnquantizedRecipe(
            getattr(torch, config.dtype, torch.float32)
        )  # "auto" is resolved before weights are quantized
    if bit_choice == "int8":
        return Int8(config)
    return Int4(replace(config, group_size=int(bit_choice.rpartition("g")[2]), symmetric=False))

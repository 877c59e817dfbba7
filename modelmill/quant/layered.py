"""A recipe for each layer: int4 in some group size, int8, or whole; ``-q auto`` chooses, ``--layer-recipe`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.quant.block import Block
from modelmill.quant.int4 import Recipe as Int4
from modelmill.quant.int8 import Recipe as Int8
from modelmill.quant.recipe import Prepared, Recipe, Statistics
from modelmill.quant.search import FORMS, WHOLE
from modelmill.weights.dense import Held as Dense
from modelmill.weights.held import HeldWeight


class Whole:
    """A layer that stays as it is, rounded to what it is stored in."""

    kind = "dense"
    calibrated = prepares = False
    layout: Mapping[str, Any] = {}

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:  # noqa: ARG002
        """In float32, as it will be read back."""
        return Dense(weight.to(self.dtype).float())


class Layered:
    """``layers`` by number. The head, where it is quantized too, is int8."""

    kind = "int4"
    layout: Mapping[str, Any] = {}
    prepares = False

    def __init__(self, config: BuildConfig, layers: int) -> None:
        """Raises UsageError for a layer or a form that is not there."""
        forms = {str(i): WHOLE for i in range(layers)} | dict(config.layer_recipes)
        for layer, form in forms.items():
            if not (layer.isdigit() and int(layer) < layers):
                raise UsageError(f"--layer-recipe {layer}={form}: the layers are 0 to {layers - 1}")
            if form not in (*FORMS, WHOLE):
                raise UsageError(f"--layer-recipe {layer}={form}: {form} is not one of {', '.join(FORMS)}, {WHOLE}")
        made = {form: _recipe(form, config) for form in sorted(set(forms.values()))}
        self.forms = {int(layer): form for layer, form in forms.items()}
        self._recipes = {layer: made[form] for layer, form in self.forms.items()}
        self._head = Int8(config)
        self.calibrated = any(recipe.calibrated for recipe in made.values())
        methods = {recipe.method for recipe in made.values() if isinstance(recipe, Int4)}
        self.method = methods.pop() if methods else "nearest"

    def of(self, module: str) -> Recipe:
        """The recipe of a linear module, by its name in the model."""
        parts = module.split(".")
        return self._recipes[int(parts[1])] if parts[0] == "layers" else self._head

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Its layers' recipes do it."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:
        """Its layers' recipes do it; this is the head's."""
        return self._head.hold(weight, statistics)


def _recipe(form: str, config: BuildConfig) -> Recipe:
    if form == WHOLE:
        return Whole(getattr(torch, config.dtype, torch.float32))  # "auto" is resolved before anything is held
    if form == "int8":
        return Int8(config)
    return Int4(replace(config, group_size=int(form.rpartition("g")[2]), symmetric=False))

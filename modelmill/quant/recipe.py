"""The contract of a quantization recipe: the folder is the registry, a recipe is a file with a class ``Recipe``.

A recipe says what it needs to know about a layer's inputs, may change the layer before it is rounded (``prepare``: what
is folded from one matrix into another), and turns each weight into a held one (``hold``). Layers are handed to it one
after another, from the first to the last, and inside a layer the sites in the order of computation, so that statistics
are those of inputs which the quantized part before has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.find import find, names
from modelmill.quant.block import Block
from modelmill.weights.held import HeldWeight

NONE = "none"
KEEP = "keep"  # no recipe either: what the checkpoint has quantized stays so
AUTO = "auto"  # one for each layer (layered)
Scales = dict[str, torch.Tensor]


@dataclass
class Statistics:
    """Of the inputs x [T, K] at one site, over all calibration tokens; float32.

    hessian: [K, K], the mean of xᵀx. mean_abs, max_abs, low, high: [K]. rows: [R, K], every so many of the inputs.
    """

    tokens: int
    hessian: torch.Tensor
    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    rows: torch.Tensor


@dataclass
class Prepared:
    """What ``prepare`` did. scales: site → [K], what the inputs at that site were divided by. facts: for the report.

    hold: site → what holds its weight in place of the recipe's own ``hold``.
    """

    scales: Scales = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    hold: dict[str, Callable[[torch.Tensor, Statistics | None], HeldWeight]] = field(default_factory=dict)


class Recipe(Protocol):
    """kind: how weights are held. layout: the kind's options (``weights.held.pack``), which decide sizes.

    calibrated: whether ``hold`` needs statistics. prepares: whether ``prepare`` does, of the layer as it was. A recipe
    that tries a layer out has ``searches`` (True) and ``search(block, statistics, flow, dtype)``, called in place of
    ``prepare`` with some calibration tokens before the layer; one that asks for no Hessian says ``moments`` (False).
    """

    kind: str
    layout: Mapping[str, Any]
    calibrated: bool
    prepares: bool

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:
        """Change the layer's dense weights, norms and biases in place, so that it computes the same.

        dtype: what norms and biases are stored in.
        """

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:
        """A weight [N, K] float32 as it will be held. statistics: of its inputs; None where there are none."""


def make_recipe(config: BuildConfig) -> Recipe | None:
    """The recipe of a build; None for "none" and "keep".

    Raises UsageError for one that is not known, or options it has not.
    """
    if config.quantization in (NONE, KEEP):
        return None
    made = _class_of(config.quantization)
    if made is None:
        raise UsageError(f"--quantization {config.quantization!r} is not one of {', '.join(recipes())}")
    found: Recipe = made(config)
    return found


def recipes() -> list[str]:
    """Names of all recipes."""
    return [NONE, KEEP, AUTO, *(name for name in names("modelmill.quant") if _class_of(name) is not None)]


def _class_of(name: str) -> Any:
    """The class ``Recipe`` that a file of this folder defines; None where it defines none."""
    module = None if name == "recipe" else find("modelmill.quant", name)
    found = getattr(module, "Recipe", None)
    return found if module is not None and getattr(found, "__module__", "") == module.__name__ else None

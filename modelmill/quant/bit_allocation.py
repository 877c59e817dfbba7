"""Chooses the smallest bit choices whose errors together stay within a limit.

The effect of one quantized layer on the model's next-token distributions (mean KL, measured with
all other layers unquantized) adds up over layers as long as it is small. So the limit is a budget:
every layer begins with its smallest bit choice, and the upgrade that saves most KL per byte is
taken until the sum is within the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.quant.group_grid import QUICK_RANGE_SEARCH, find_group_grid
from modelmill.weights.base import WeightFormat, pack_as_format
from modelmill.weights.dense import DenseWeight as Dense
from modelmill.weights.int4 import Int4Weight as Int4
from modelmill.weights.int4 import resolve_group_size

UNQUANTIZED_CHOICE = "none"
BIT_CHOICES = ("int4-g128", "int4-g64", "int4-g32", "int8")
"""From the smallest to the largest; the last resort is an unquantized layer."""


@dataclass(frozen=True)
class LayerBitOption:
    """One bit choice of one layer: its bytes, and the KL that it alone causes."""

    bit_choice: str
    nbytes: int
    kl: float


def quantize_weight_quickly(
    weight: torch.Tensor, bit_choice: str, importance: torch.Tensor
) -> WeightFormat:
    """Quantize a weight [N, K] float32 fast: clipped ranges, round to nearest.

    importance: [K], mean squares of the inputs, used to clip the ranges.
    """
    if bit_choice == UNQUANTIZED_CHOICE:
        return Dense(weight)
    if bit_choice == "int8":
        return pack_as_format("int8", weight, torch.float32)
    group = resolve_group_size(int(bit_choice.rpartition("g")[2]), weight.shape[1])
    grid = find_group_grid(weight, group, importance=importance, search=QUICK_RANGE_SEARCH)
    return Int4.from_codes(grid.quantize(weight), grid.scale, grid.offset, group)


def quantize_layer_linears(
    block: QuantizableLayer,
    bit_choice: str,
    importance: Mapping[str, torch.Tensor],
    dense_weights: Mapping[str, WeightFormat],
) -> int:
    """Quantize a layer's linears to one bit choice; return their bytes.

    dense_weights: the unquantized weights, by path.
    """
    total = 0
    for spec in block.spec.linears:
        weight = dense_weights[spec.path].dequantize()
        quantized = quantize_weight_quickly(weight, bit_choice, importance[spec.site])
        block.linear_by_path(spec.path).weight = quantized
        total += sum(t.numel() * t.element_size() for t in quantized.tensors().values())
    return total


def allocate_bits(
    layer_options: Sequence[Sequence[LayerBitOption]], kl_budget: float
) -> list[LayerBitOption]:
    """Choose one option per layer so that the sum of KL is within ``kl_budget``.

    layer_options: by layer; each list contains UNQUANTIZED_CHOICE with a KL of 0.
    """
    ordered = [sorted(each, key=lambda option: option.nbytes) for each in layer_options]
    chosen = [each[0] for each in ordered]
    while sum(option.kl for option in chosen) > kl_budget:
        best: tuple[float, int, LayerBitOption] | None = None
        for layer, (now, each) in enumerate(zip(chosen, ordered, strict=True)):
            for option in each:
                if option.kl >= now.kl or option.nbytes <= now.nbytes:
                    continue
                worth = (now.kl - option.kl) / (option.nbytes - now.nbytes)
                if best is None or worth > best[0]:
                    best = (worth, layer, option)
        if best is None:
            break  # no upgrade is left
        chosen[best[1]] = best[2]
    return _revert_needless_upgrades(chosen, ordered, kl_budget)


def _revert_needless_upgrades(
    chosen: list[LayerBitOption],
    layer_options: Sequence[Sequence[LayerBitOption]],
    kl_budget: float,
) -> list[LayerBitOption]:
    """Undo upgrades that turned out to be unnecessary, the one that saves most bytes first."""
    while True:
        spare = kl_budget - sum(option.kl for option in chosen)
        best: tuple[int, int, LayerBitOption] | None = None
        for layer, (now, each) in enumerate(zip(chosen, layer_options, strict=True)):
            for option in each:
                saved = now.nbytes - option.nbytes
                if saved > 0 and option.kl - now.kl <= spare and (best is None or saved > best[0]):
                    best = (saved, layer, option)
        if best is None:
            return chosen
        chosen[best[1]] = best[2]

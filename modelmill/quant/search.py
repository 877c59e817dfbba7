"""Which layer bears how few bits: choosing the smallest forms whose errors together stay within a limit.

What one rounded layer does to the model's next-token distributions (mean KL, measured with all other layers whole) adds
up over layers as long as it is small. So the choice is a budget: every layer begins in its smallest form, and the step
that saves most KL for its bytes is taken until the sum fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelmill.quant.block import SITES, Block
from modelmill.quant.grid import QUICK, find_grid
from modelmill.weights.dense import Held as Dense
from modelmill.weights.held import HeldWeight, pack
from modelmill.weights.int4 import Held as Int4
from modelmill.weights.int4 import columns_of

WHOLE = "none"
FORMS = ("int4-g128", "int4-g64", "int4-g32", "int8")
"""From the smallest to the largest; behind them a layer stays whole."""


@dataclass(frozen=True)
class Option:
    """One form of one layer: its bytes, and the KL that it costs alone."""

    form: str
    nbytes: int
    kl: float


def rounded(weight: torch.Tensor, form: str, importance: torch.Tensor) -> HeldWeight:
    """A weight [N, K] float32 in a form, quickly: ranges clipped by the inputs' energy [K], rounded to nearest."""
    if form == WHOLE:
        return Dense(weight)
    if form == "int8":
        return pack("int8", weight, torch.float32)
    group = columns_of(int(form.rpartition("g")[2]), weight.shape[1])
    grid = find_grid(weight, group, importance=importance, search=QUICK)
    return Int4.from_codes(grid.codes(weight), grid.scale, grid.offset, group)


def hold_all(block: Block, form: str, importance: Mapping[str, torch.Tensor], dense: Mapping[str, HeldWeight]) -> int:
    """Put a layer's linears into a form; returns their bytes. dense: the whole ones, by site."""
    total = 0
    for site in SITES:
        held = rounded(dense[site].dense(), form, importance[site])
        block.linear(site).held = held
        total += sum(t.numel() * t.element_size() for t in held.tensors().values())
    return total


def choose(options: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """One option a layer, their KL within ``budget``. options: by layer, WHOLE with a KL of 0 among them."""
    ordered = [sorted(each, key=lambda option: option.nbytes) for each in options]
    chosen = [each[0] for each in ordered]
    while sum(option.kl for option in chosen) > budget:
        best: tuple[float, int, Option] | None = None
        for layer, (now, each) in enumerate(zip(chosen, ordered, strict=True)):
            for option in each:
                if option.kl >= now.kl or option.nbytes <= now.nbytes:
                    continue
                worth = (now.kl - option.kl) / (option.nbytes - now.nbytes)
                if best is None or worth > best[0]:
                    best = (worth, layer, option)
        if best is None:
            break  # everything is as good as it gets
        chosen[best[1]] = best[2]
    return _slimmed(chosen, ordered, budget)


def _slimmed(chosen: list[Option], ordered: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Steps that turned out not to be needed are taken back, the one that saves most bytes first."""
    while True:
        spare = budget - sum(option.kl for option in chosen)
        best: tuple[int, int, Option] | None = None
        for layer, (now, each) in enumerate(zip(chosen, ordered, strict=True)):
            for option in each:
                saved = now.nbytes - option.nbytes
                if saved > 0 and option.kl - now.kl <= spare and (best is None or saved > best[0]):
                    best = (saved, layer, option)
        if best is None:
            return chosen
        chosen[best[1]] = best[2]

"""Warns where the acceptance text leaves the static input ranges that calibration found.

A static range is a promise about text that was not calibrated on. A token that leaves it is clipped
or rounded with longer steps; either costs accuracy, and many such tokens mean that the engine was
calibrated on another kind of text than it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from modelmill.accept.vision_stage_check import round_significant_digits
from modelmill.nn.linear import Linear

# Factor and difference by which the share of rows outside must exceed calibration's for a warning.
# SmolLM2 calibrated on news: 0.9 % of rows on WikiText-2, 18 % on program text.
MIN_OUT_OF_RANGE_RATIO, MIN_OUT_OF_RANGE_INCREASE = 3.0, 0.02


class OutOfRangeRowCounter:
    """Counts, by linear module, the rows of its input outside of its static range.

    Attributes:
        counts: module path → (rows outside, rows).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.counts: dict[str, tuple[int, int]] = {}

    def count_input_rows(self, name: str, args: Sequence[Any]) -> None:
        """Count the input of a module that was called with ``args``; others are passed over."""
        module = self._model.get_submodule(name)
        if not isinstance(module, Linear) or name == "head":
            return
        outside = module.weight.input_row_outside_range_mask(args[0])
        if outside is not None:
            self.counts[name] = (int(outside.sum()), len(outside))

    def out_of_range_share(self) -> float:
        """Return the share of rows outside over all modules; 0 without static ranges."""
        rows = sum(count for _, count in self.counts.values())
        return sum(outside for outside, _ in self.counts.values()) / rows if rows else 0.0

    def worst_module_and_share(self) -> tuple[str, float]:
        """Return the module with the largest share of rows outside, and the share."""
        return max(
            ((name, outside / rows) for name, (outside, rows) in self.counts.items()),
            key=lambda each: each[1],
        )


def calibration_out_of_range_share(facts: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of calibration rows outside of static ranges, over all matrices."""
    shares = [float(each["outside_range"]) for each in facts if "outside_range" in each]
    return sum(shares) / len(shares) if shares else 0.0


def static_range_report(
    use: OutOfRangeRowCounter, facts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what the acceptance report says of static ranges; nothing without any.

    Args:
        use: of the acceptance text.
        facts: quantization facts of each matrix, with calibration's share of rows outside.
    """
    if not use.counts:
        return {}
    name, most = use.worst_module_and_share()
    share, calibration = use.out_of_range_share(), calibration_out_of_range_share(facts)
    ranges = {
        "calibration": round_significant_digits(calibration),
        "acceptance": round_significant_digits(share),
        "worst": {"module": name, "share": round_significant_digits(most)},
    }
    disagree = share > max(
        MIN_OUT_OF_RANGE_RATIO * calibration, calibration + MIN_OUT_OF_RANGE_INCREASE
    )
    if not disagree:
        return {"static_ranges": ranges}
    warning = (
        f"the acceptance text goes far beyond the static ranges of activations in "
        f"{100 * share:.1f} % of rows, the calibration data in {100 * calibration:.1f} % "
        f"(most: {name}, {100 * most:.0f} %); give --calibration FILE with text like that the "
        "engine will read"
    )
    return {"static_ranges": ranges, "warnings": [warning]}

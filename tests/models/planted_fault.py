"""A planted fault in a family's modules or tensors, and the refusal that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.accept.build_and_accept import build_and_accept

PlantedFault = tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...], int]
"""What plants it, modules of which the report may name any, and the layer that it names."""

RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "int4": {"group_size": 32, "method": "nearest"},
    "smoothquant": {"calibration_samples": 8, "calibration_length": 32},
}


class FaultyBuild(NamedTuple):
    """A fault, and the engine in which it is planted."""

    fault: PlantedFault
    dtype: str
    recipe: str


def each_fault(
    faults: Mapping[str, PlantedFault], recipes: tuple[str, ...] = tuple(RECIPES)
) -> pytest.MarkDecorator:
    """Calls a test with each fault in bfloat16, and in float32 with each recipe."""
    builds = [("bfloat16", "none"), *(("float32", recipe) for recipe in recipes)]
    return pytest.mark.parametrize(
        "faulty",
        [
            pytest.param(FaultyBuild(fault, dtype, recipe), id=f"{name}-{dtype}-{recipe}")
            for dtype, recipe in builds
            for name, fault in faults.items()
        ],
    )


def assert_refused_by_name(faulty: FaultyBuild, checkpoint: Path, out: Path) -> None:
    """Build with the fault: nothing is written, and the report names layer and module."""
    plant, modules, layer = faulty.fault
    with plant():
        report, written = build_and_accept(
            checkpoint, out, faulty.dtype, faulty.recipe, **RECIPES[faulty.recipe]
        )
    assert not written
    assert (report["layer"], report["module"] in modules) == (layer, True), report["reason"]

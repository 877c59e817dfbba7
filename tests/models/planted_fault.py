"""A planted fault in a family's modules or tensors, and the refusal that names it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.accept.build_and_accept import build_and_accept

PlantedFault = tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...], int]
"""What plants it, modules of which the report may name any, and the layer that it names."""


def assert_refused_by_name(
    fault: PlantedFault, checkpoint: Path, out: Path, dtype: str, recipe: str, **options: Any
) -> None:
    """Build with the fault: nothing is written, and the report names layer and module."""
    plant, modules, layer = fault
    with plant():
        report, written = build_and_accept(checkpoint, out, dtype, recipe, **options)
    assert not written
    assert (report["layer"], report["module"] in modules) == (layer, True), report["reason"]

"""A planted fault in a family's modules or tensors, and the refusal that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from modelmill.builder import tensor_plan
from modelmill.checkpoint import rename
from modelmill.core.model_family import checkpoint_tensor_rules
from modelmill.ops import registry
from tests.accept.build_and_accept import build_and_accept

PlantedFault = tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...], int | None]
"""What plants it, modules of which the report may name any, and the layer that it names."""

CALIBRATION = {"calibration_samples": 8, "calibration_length": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "int4": {"group_size": 32, "method": "nearest"},
    "smoothquant": CALIBRATION,
    "int8": {},
    "fp8": {},
    "rptq": CALIBRATION,
}
FEW_RECIPES = ("none", "int4", "smoothquant")


@contextmanager
def reference_fault(
    op: ModuleType, name: str, fault: Any, module: ModuleType | None = None
) -> Iterator[None]:
    """A function replaced that the torch reference of an op calls; no C++ kernel computes the op.

    Args:
        op: The op's file.
        name: The function.
        fault: What takes its place.
        module: Where the function is; None: in the op's file.
    """
    kernel = registry.implementation(op.__name__.rpartition(".")[2], "cpu")
    with (
        mock.patch.object(kernel, "supports", return_value=False),
        mock.patch.object(op if module is None else module, name, fault),
    ):
        yield


class FaultyBuild(NamedTuple):
    """A fault, and the engine in which it is planted."""

    fault: PlantedFault
    dtype: str
    recipe: str


def each_fault(
    faults: Mapping[str, PlantedFault], recipes: tuple[str, ...] = FEW_RECIPES
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


def refusal_test(
    faults: Mapping[str, PlantedFault], recipes: Iterable[str] = FEW_RECIPES
) -> Callable[..., None]:
    """The test that each of a module's faults is refused by name, with its ``checkpoint``."""

    @each_fault(faults, tuple(recipes))
    def test(faulty: FaultyBuild, checkpoint: Path, tmp_path: Path) -> None:
        assert_refused_by_name(faulty, checkpoint, tmp_path / "e")

    return test


@contextmanager
def changed_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A tensor of the engine that is not the checkpoint's."""
    real = rename.apply_rule

    def apply_rule(rule: Any, *args: Any) -> torch.Tensor:
        tensor = real(rule, *args)
        return change(tensor) if rule.target == name else tensor

    with mock.patch.object(tensor_plan, "apply_rule", apply_rule):
        yield


@contextmanager
def changed_module(
    module: type[torch.nn.Module], forward: Callable[..., torch.Tensor]
) -> Iterator[None]:
    """A module that computes something else."""
    with mock.patch.object(module, "forward", forward):
        yield


@contextmanager
def changed_config(family: ModuleType, change: Callable[[Any], Any]) -> Iterator[None]:
    """A family that reads another config than the checkpoint's."""
    real = family.config_from_hf
    with mock.patch.object(family, "config_from_hf", lambda raw: change(real(raw))):
        yield


@contextmanager
def changed_rules(family: ModuleType, change: Callable[[Any], Any]) -> Iterator[None]:
    """A family that makes some of its tensors by another rule."""
    real = checkpoint_tensor_rules(family).rules

    def rules(config: Any) -> list[Any]:
        return [change(rule) for rule in real(config)]

    with mock.patch.object(family, "rename_rules", rules, create=True):
        yield


def _fault(
    plant: Callable[[Any, Any], AbstractContextManager[Any]],
    target: Any,
    change: Any,
    names: str | tuple[str, ...],
    layer: int | None = 0,
) -> PlantedFault:
    """A fault for a table of them.

    Args:
        plant: Plants a change in a target; given by the functions below.
        target: What is changed: a module's class, a tensor's name, or a family.
        change: What it becomes, as ``plant`` takes it.
        names: The module that the report names, or any of these.
        layer: The layer that it names; None: none.
    """
    modules = (names,) if isinstance(names, str) else names
    return partial(plant, target, change), modules, layer


module_fault = partial(_fault, changed_module)
tensor_fault = partial(_fault, changed_tensor)
config_fault = partial(_fault, changed_config)
rule_fault = partial(_fault, changed_rules)

"""A planted fault in a family's modules or tensors, and the refusal that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from modelmill.accept import run
from modelmill.builder import tensor_plan
from modelmill.checkpoint import rename
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.model_family import checkpoint_tensor_rules
from modelmill.ops import registry
from tests.accept.build_and_accept import build_and_accept

PlantedFault = tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...], int | None]
"""What plants it, modules of which the report may name any, and the layer that it names."""

CALIBRATION = {"calibration_samples": 8, "calibration_length": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "int4": {"group_size": 32, "method": "nearest"},
    "smoothquant": {**CALIBRATION, "alpha": 0.5},
    "int8": {},
    "fp8": CALIBRATION,
    "rptq": CALIBRATION,
}

NO_SEQUENCES: dict[str, Any] = {"ok": True, "broken": []}
"""What a check of whole sequences finds where none is wrong."""


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
    """A fault, and the engine in which it is planted.

    Attributes:
        fault: The fault.
        dtype: The engine's dtype.
        recipe: Its recipe.
        is_shortened: Whether whole sequences are not run, so that the checks of modules and layers
            have to refuse it alone, and the engine is made without the fault where that leaves its
            tensors and config as they are.
    """

    fault: PlantedFault
    dtype: str
    recipe: str
    is_shortened: bool


def each_fault(faults: Mapping[str, PlantedFault]) -> pytest.MarkDecorator:
    """Calls a test with each fault in each dtype and recipe.

    Of the two dtypes of a recipe one is marked as ``further`` in the test's name: the first fault's
    in float32, bfloat16, ..., the next one's in bfloat16, float32, ...; so the rest has each fault
    in every recipe and both dtypes, and each recipe in both dtypes. Unquantized, float32 always is
    among the rest, and is not shortened; nor are further ones.
    """
    engines = []
    for number, (name, fault) in enumerate(faults.items()):
        for column, recipe in enumerate(RECIPES):
            for row, dtype in enumerate(("float32", "bfloat16")):
                plain = (dtype, recipe) == ("float32", "none")
                further = not plain and (number + column + row) % 2 == 1
                engines.append(
                    pytest.param(
                        FaultyBuild(fault, dtype, recipe, not plain and not further),
                        id=f"{'further-' if further else ''}{name}-{dtype}-{recipe}",
                    )
                )
    return pytest.mark.parametrize("faulty", engines)


class FaultlessEngines(dict[tuple[str, str], Path]):
    """The engines of a checkpoint by dtype and recipe, each made when a fault is first put in."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        super().__init__()
        self._checkpoint, self._folder = checkpoint, folder

    def __missing__(self, bits: tuple[str, str]) -> Path:
        dtype, recipe = bits
        engine = self._folder / f"{dtype}-{recipe}"
        report, written = build_and_accept(
            self._checkpoint, engine, dtype, recipe, **RECIPES[recipe]
        )
        assert written, report.get("reason", report)
        self[bits] = engine
        return engine


def _engine_makers(family: ModuleType) -> tuple[Any, ...]:
    """What makes an engine's tensors and config; a fault of them replaces one."""
    return (
        tensor_plan.apply_rule,
        family.config_from_hf,
        getattr(family, "rename_rules", None),
    )


def assert_refused_by_name(
    faulty: FaultyBuild, family: str, faultless: FaultlessEngines, checkpoint: Path, out: Path
) -> None:
    """Build with the fault: nothing is written, and the report names layer and module."""
    plant, modules, layer = faulty.fault
    dtype, recipe = faulty.dtype, faulty.recipe
    source = import_module(f"modelmill.models.{family}")
    makers = _engine_makers(source)
    engine = faultless[dtype, recipe] if faulty.is_shortened else None
    shortened = mock.patch.object(run, "check_sequence_logits", return_value=NO_SEQUENCES)
    with plant(), shortened if faulty.is_shortened else nullcontext():
        if engine is not None and _engine_makers(source) == makers:
            report = run.run_engine_acceptance(engine, open_checkpoint(checkpoint))
            written = report["accepted"]
        else:
            report, written = build_and_accept(checkpoint, out, dtype, recipe, **RECIPES[recipe])
    assert not written
    assert (report["layer"], report["module"] in modules) == (layer, True), report["reason"]


def refusal_test(faults: Mapping[str, PlantedFault]) -> Callable[..., None]:
    """The test that each of a module's faults is refused by name.

    It reads the fixtures ``checkpoint`` and ``faultless``.
    """

    @each_fault(faults)
    def test(
        faulty: FaultyBuild,
        request: pytest.FixtureRequest,
        checkpoint: Path,
        faultless: FaultlessEngines,
        tmp_path: Path,
    ) -> None:
        family: str = request.module.FAMILY
        assert_refused_by_name(faulty, family, faultless, checkpoint, tmp_path / "e")

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

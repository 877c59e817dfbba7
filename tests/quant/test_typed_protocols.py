"""Recipes and weight formats are classes with defaults: nothing asks whether a member exists.

With ``getattr(recipe, "needs_hesian", True)`` a typo is silence; with a base class mypy names it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.quant.recipe import Recipe
from modelmill.weights.base import WeightFormat

ROOT = Path(__file__).resolve().parent.parent.parent / "modelmill"
FUNCTIONS = ("getattr", "hasattr")
SUBJECTS = ("recipe", "weight", "quantized", "packed", "format_class")


def _names(node: ast.expr) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _getattr_members() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if not any(function in text for function in FUNCTIONS):  # parsing all takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in FUNCTIONS
                and not isinstance(node.args[0], ast.Constant)
                and any(name.lower().endswith(SUBJECTS) for name in _names(node.args[0]))
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_no_member_of_a_recipe_or_weight_is_looked_up_by_name() -> None:
    assert not list(_getattr_members())


def _classes(package: str, base: type) -> Iterator[type]:
    for name in list_module_names(package):
        module = import_module_if_exists(package, name)
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, base) and cls.__module__.endswith(name):
                yield cls


@pytest.mark.parametrize("cls", _classes("modelmill.quant", Recipe), ids=lambda cls: cls.__name__)
def test_a_recipe_adds_no_public_flag_that_the_base_class_does_not_know(cls: type) -> None:
    added = {name for name in vars(cls) if name.startswith("needs_")}
    assert added <= set(vars(Recipe))


def test_every_format_is_a_weight_format() -> None:
    formats = {
        cls.__module__.rpartition(".")[2] for cls in _classes("modelmill.weights", WeightFormat)
    }
    assert formats == set(list_module_names("modelmill.weights"))


def test_a_format_without_optional_members_has_the_defaults() -> None:
    module = import_module_if_exists("modelmill.weights", "mixed_rows")
    dense = import_module_if_exists("modelmill.weights", "dense")
    assert module is not None
    assert dense is not None
    part = dense.DenseWeight(torch.ones(2, 3))
    weight = module.MixedRowsWeight((part, part))
    x = torch.ones(1, 3)
    assert weight.input_quant_spec is None
    assert weight.upcast_spec is None
    assert weight.fake_quantize_input(x) is x
    assert weight.extra_unpacked_tensors() == []
    assert weight.try_linear_add(x, None, x, None) is None

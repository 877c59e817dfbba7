"""A recipe's file declares its options, tolerances and format; lists, flags and docs follow."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from modelmill.builder.recipe_option_check import RECIPE_OPTIONS
from modelmill.core.config import RECIPE_CHOICES, BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.core.recipe_declaration import (
    RecipeDeclaration,
    read_recipe_declarations,
    read_recipe_options,
    tolerances_by_weight_format,
)
from modelmill.quant.recipe import Recipe, recipe_names

ROOT = Path(__file__).resolve().parent.parent.parent
# names of options that a recipe's code reads from BuildConfig
READ = re.compile(r"\bconfig\.(\w+)")


def _declared_in_modules() -> dict[str, RecipeDeclaration]:
    modules = {
        name: import_module_if_exists("modelmill.quant", name)
        for name in list_module_names("modelmill.quant")
    }
    declarations = {
        n: vars(m)["DECLARATION"] for n, m in modules.items() if "DECLARATION" in vars(m)
    }
    return {declaration.name or name: declaration for name, declaration in declarations.items()}


def test_what_is_read_from_the_source_is_what_the_module_has() -> None:
    assert dict(read_recipe_declarations()) == _declared_in_modules()


def test_every_recipe_is_declared_and_listed() -> None:
    assert set(recipe_names()) == set(RECIPE_CHOICES)
    assert set(RECIPE_CHOICES) == {"none", *read_recipe_declarations()}
    assert {"keep", "auto", "int4"} <= set(read_recipe_declarations())


def test_a_recipe_writes_the_format_that_it_declares() -> None:
    for name, declaration in read_recipe_declarations().items():
        recipe = getattr(import_module_if_exists("modelmill.quant", name), "RECIPE", None)
        if recipe is not None:
            assert issubclass(recipe, Recipe)
            assert recipe.weight_format == declaration.weight_format
            assert declaration.weight_format in tolerances_by_weight_format()


def test_a_recipe_reads_no_option_that_it_does_not_declare() -> None:
    for name, read in RECIPE_OPTIONS.items():
        module = import_module_if_exists("modelmill.quant", name)
        if module is not None:
            used = set(READ.findall(inspect.getsource(module))) & set(read_recipe_options())
            assert used <= set(read), name


def test_every_declared_option_is_a_field_with_its_help() -> None:
    by_name = {each.name: each for each in fields(BuildConfig)}
    for name, declared in read_recipe_options().items():
        each = by_name[name]
        assert (each.default, each.metadata["help"]) == (declared.default, declared.help)
        assert each.type == declared.type_hint
        assert each.default is not MISSING


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bits", "w9a9", "--bits 'w9a9' is not one of w8a8, w4a8, w4a4"),
        ("group_size", 48, "--group-size 48 is not one of 128, 64, 32, -1"),
        ("splits_per_channel", 5, "--splits-per-channel (--copies) must be 1 to 4, not 5"),
        ("max_layer_error", 0, "--max-layer-error must be above 0, not 0"),
        ("max_kl", -1.0, "--max-kl must be above 0, not -1.0"),
    ],
)
def test_a_declared_limit_is_checked(name: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        BuildConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("page", ["docs/quantization.md", "tools/quantization.template.md"])
def test_the_docs_have_a_row_for_each_recipe(page: str) -> None:
    text = (ROOT / page).read_text()
    for name, declaration in read_recipe_declarations().items():
        assert f"\n| `{name}` | {' | '.join(declaration.docs)} |\n" in text


def test_the_declarations_are_read_without_torch() -> None:
    code = "import modelmill.core.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

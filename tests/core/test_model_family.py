"""The optional constants of model files: read in one place, and none is misspelt."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from modelmill.core.model_family import (
    FAMILY_OPTIONS,
    FamilyOptions,
    checkpoint_tensors,
    family_options,
)
from modelmill.core.registry import closest_name, find_module, module_names


@pytest.mark.parametrize("name", module_names("modelmill.models"))
def test_no_constant_of_a_model_file_resembles_an_option_without_being_one(name: str) -> None:
    family = find_module("modelmill.models", name)
    constants = [each for each in vars(family) if each.isupper() and not each.startswith("_")]
    others = [each for each in constants if each not in FAMILY_OPTIONS]
    near = {each: closest_name(each, list(FAMILY_OPTIONS)) for each in others}
    assert not {each: option for each, option in near.items() if option is not None}


def test_a_file_without_them_has_the_defaults() -> None:
    assert family_options(None) == family_options(ModuleType("toy")) == FamilyOptions()


def test_what_a_file_defines_is_read() -> None:
    sam, llama = (
        family_options(find_module("modelmill.models", name)) for name in ("sam", "llama")
    )
    assert (sam.ENGINE_TYPE, llama.ENGINE_TYPE) == ("segmentation", "language")
    assert sam.config_from_shapes is not None
    assert llama.UNUSED_CONFIG_KEYS == ("max_window_layers",)


def test_a_function_of_the_file_has_precedence_over_its_layout() -> None:
    family = ModuleType("toy")
    family.LAYOUT = SimpleNamespace(  # type: ignore[attr-defined]
        prefixes=("model.",), rules=lambda _: ["layout"], ignored_tensors=lambda _: ("buffer",)
    )
    tensors = checkpoint_tensors(family)
    assert (tensors.prefixes, tensors.rules(None)) == (("model.",), ["layout"])
    family.rules = lambda _: ["own"]  # type: ignore[attr-defined]
    tensors = checkpoint_tensors(family)
    assert (tensors.rules(None), tensors.ignored_tensors(None)) == (["own"], ("buffer",))


def test_a_file_without_a_layout_has_all_three_by_itself() -> None:
    tensors = checkpoint_tensors(find_module("modelmill.models", "sam"))
    assert "module." in tensors.prefixes

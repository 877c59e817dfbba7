"""The optional constants of model files: read in one place, and none is misspelt."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from modelmill.core.model_family import (
    FAMILY_OPTIONS,
    ModelFamilyOptions,
    checkpoint_tensor_rules,
    read_family_options,
)
from modelmill.core.module_lookup import (
    import_module_if_exists,
    list_module_names,
    most_similar_name,
)


@pytest.mark.parametrize("name", list_module_names("modelmill.models"))
def test_no_constant_of_a_model_file_resembles_an_option_without_being_one(name: str) -> None:
    family = import_module_if_exists("modelmill.models", name)
    constants = [each for each in vars(family) if each.isupper() and not each.startswith("_")]
    others = [each for each in constants if each not in FAMILY_OPTIONS]
    near = {each: most_similar_name(each, list(FAMILY_OPTIONS)) for each in others}
    assert not {each: option for each, option in near.items() if option is not None}


def test_a_file_without_them_has_the_defaults() -> None:
    assert (
        read_family_options(None) == read_family_options(ModuleType("toy")) == ModelFamilyOptions()
    )


def test_what_a_file_defines_is_read() -> None:
    sam, llama = (
        read_family_options(import_module_if_exists("modelmill.models", name))
        for name in ("sam", "llama")
    )
    assert (sam.ENGINE_TYPE, llama.ENGINE_TYPE) == ("segmentation", "language")
    assert sam.config_from_shapes is not None
    assert llama.UNUSED_CONFIG_KEYS == ("max_window_layers",)


def test_a_function_of_the_file_has_precedence_over_its_layout() -> None:
    family = ModuleType("toy")
    family.CHECKPOINT_LAYOUT = SimpleNamespace(  # type: ignore[attr-defined]
        prefixes=("model.",),
        rename_rules=lambda _: ["layout"],
        ignored_tensors=lambda _: ("buffer",),
    )
    tensors = checkpoint_tensor_rules(family)
    assert (tensors.prefixes, tensors.rules(None)) == (("model.",), ["layout"])
    family.rename_rules = lambda _: ["own"]  # type: ignore[attr-defined]
    tensors = checkpoint_tensor_rules(family)
    assert (tensors.rules(None), tensors.ignored_tensors(None)) == (["own"], ("buffer",))


def test_a_file_without_a_layout_has_all_three_by_itself() -> None:
    tensors = checkpoint_tensor_rules(import_module_if_exists("modelmill.models", "sam"))
    assert "module." in tensors.prefixes

"""The options that each recipe reads; an option that the recipe ignores is an error."""

from __future__ import annotations

from dataclasses import fields

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    RecipeOption,
    read_recipe_declarations,
    read_recipe_options,
)

COMMON_OPTIONS = ("quantize_head",)
RECIPE_OPTIONS = {
    name: (*COMMON_OPTIONS, *recipe.options, *recipe.reads)
    for name, recipe in read_recipe_declarations().items()
}
"""The options that each recipe reads; a plan omits the others."""
ALL_RECIPE_OPTIONS = frozenset().union(*RECIPE_OPTIONS.values())


VISION_ENCODER_OPTIONS = ("activation_scales", "weight_scales")
"""The options of recipes for models that read images."""


def check_recipe_options(config: BuildConfig, *, segmentation: bool = False) -> None:
    """Check that the recipe reads every option that is not at its default.

    It is called where a user sets the options; a program may use one set for many recipes.

    segmentation: the model segments images.

    Raises:
        UsageError: if an option is not read.
    """
    read = RECIPE_OPTIONS.get(config.quantization, ())
    if segmentation:
        read = VISION_ENCODER_OPTIONS if config.quantization != "none" else ()
    elif config.tower != "none":
        read = (*read, *VISION_ENCODER_OPTIONS)
    for each in fields(config):
        if (
            each.name in ALL_RECIPE_OPTIONS
            and each.name not in read
            and getattr(config, each.name) != each.default
        ):
            declared = read_recipe_options().get(each.name, RecipeOption(None, ""))
            flag = declared.label(each.name)
            readers = ", ".join(
                f"-q {recipe}" for recipe, names in RECIPE_OPTIONS.items() if each.name in names
            )
            raise UsageError(
                f"{flag} is for {readers}, not for -q {config.quantization}; leave it out"
            )

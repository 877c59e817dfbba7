"""An option that the recipe does not read is refused where a person gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.recipe_option_check import (
    RECIPE_OPTIONS,
    VISION_ENCODER_OPTIONS,
    check_recipe_options,
)
from modelmill.cli.main import run_command_line
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.llm import LLM
from modelmill.quant.recipe import recipe_names
from modelmill.segmenter import Segmenter
from tests.accept.build_and_accept import save_tiny
from tests.models.sam_seeded import small_file

OTHER: dict[str, Any] = {
    "quantize_head": True, "method": "nearest", "group_size": 64, "symmetric": True,
    "activation_scales": "tensor",
    "weight_scales": "tensor", "alpha": "0.5", "max_layer_error": 0.5, "bits": "w4a8",
    "mode": "folded",
    "splits_per_channel": 1,
}  # fmt: skip


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("model", ["text", "pictures", "both"])
def test_what_a_recipe_does_not_read_is_refused(recipe: str, name: str, model: str) -> None:
    config = BuildConfig(
        quantization=recipe, tower="int8" if model == "both" else "none", **{name: OTHER[name]}
    )
    reads = (
        name in VISION_ENCODER_OPTIONS
        if model == "pictures" and recipe != "none"
        else name in RECIPE_OPTIONS.get(recipe, ())
    )
    if model == "pictures" and recipe == "none":
        reads = False
    if reads or (model == "both" and name in VISION_ENCODER_OPTIONS):
        check_recipe_options(config, segmentation=model == "pictures")
        return
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UsageError, match=rf"{flag}( \(--\w+\))? is for -q .*leave it out"):
        check_recipe_options(config, segmentation=model == "pictures")


def test_asked_by_the_command_line_and_the_classes(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    text, pictures = save_tiny("llama", tmp_path / "hf"), small_file(tmp_path)
    for checkpoint in (text, pictures):
        assert (
            run_command_line(
                ["build", str(checkpoint), "--dry-run", "-q", "int8", "--group-size", "64"]
            )
            == 2
        )
        assert (
            "--group-size is for -q int4, not for -q int8; leave it out" in capsys.readouterr().err
        )
    with pytest.raises(UsageError, match="--alpha is for -q smoothquant"):
        LLM(text, quantization="int8", alpha="0.5", device="cpu")
    with pytest.raises(UsageError, match="--symmetric is for -q int4"):
        Segmenter(pictures, quantization="int8", symmetric=True, device="cpu")


def test_a_flag_is_named_with_its_other_names() -> None:
    """Who writes --copies does not know what --splits-per-channel is."""
    with pytest.raises(UsageError, match=r"--splits-per-channel \(--copies\) is for -q rptq"):
        check_recipe_options(BuildConfig(quantization="int4", splits_per_channel=2))

"""``-q auto``: the smallest forms whose errors keep a stated limit, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.artifact.store import open_artifact
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.eval.datasets import refuse_calibration_file
from modelmill.quant.bit_allocation import (
    BIT_CHOICES,
    UNQUANTIZED_CHOICE,
    LayerBitOption,
    allocate_bits,
    quantize_weight_quickly,
)
from tests.accept.build_and_accept import build_and_accept, save_tiny

SMALL = {
    "target": "cpu",
    "quantization": "auto",
    "calibration_samples": 4,
    "calibration_length": 60,
}


def plan(folder: Path, **options: Any) -> Any:
    return make_build_plan(open_checkpoint(folder), BuildConfig(**{**SMALL, **options}))


def menu(costs: list[float]) -> list[LayerBitOption]:
    """One layer: forms of growing size, the last whole."""
    sizes = (425, 450, 500, 800, 3200)
    return [
        LayerBitOption(bit_choice, size, kl)
        for bit_choice, size, kl in zip(
            (*BIT_CHOICES, UNQUANTIZED_CHOICE), sizes, (*costs, 0.0), strict=True
        )
    ]


COSTS = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(lambda c: sorted(c, reverse=True))


@settings(max_examples=200, deadline=None)
@given(layers=st.lists(COSTS, min_size=1, max_size=6), budget=st.floats(0, 2))
def test_a_choice_keeps_its_budget_and_no_single_step_down_would(
    layers: list[list[float]], budget: float
) -> None:
    options = [menu(costs) for costs in layers]
    chosen = allocate_bits(options, budget)
    total = sum(option.kl for option in chosen)
    assert total <= budget
    for now, each in zip(chosen, options, strict=True):
        assert now in each
        for other in each:
            assert other.nbytes >= now.nbytes or total - now.kl + other.kl > budget


def test_bits_go_where_they_save_most() -> None:
    fragile, robust = menu([0.9, 0.6, 0.5, 0.01]), menu([0.03, 0.02, 0.01, 0.0])
    assert [option.bit_choice for option in allocate_bits([robust, fragile, robust], 0.1)] == [
        "int4-g128",
        "int8",
        "int4-g128",
    ]
    assert [option.bit_choice for option in allocate_bits([robust, fragile], 2.0)] == [
        "int4-g128",
        "int4-g128",
    ]
    assert [option.bit_choice for option in allocate_bits([robust, fragile], 0.0)] == [
        "int8",
        UNQUANTIZED_CHOICE,
    ]


def test_finer_forms_err_less() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 256, generator=generator)
    mean_square = torch.rand(256, generator=generator) + 0.1
    errors = []
    for bit_choice in (*BIT_CHOICES, UNQUANTIZED_CHOICE):
        off = quantize_weight_quickly(weight, bit_choice, mean_square).dequantize() - weight
        errors.append(float((off.square() * mean_square).sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("auto") / "hf")


def test_a_wider_limit_is_never_larger_and_what_is_reported_is_kept(llama: Path) -> None:
    sizes = []
    for limit in (1e-7, 1e-3, 1e-1, 1e3):
        made = plan(llama, max_kl=limit)
        assert made.auto_result is not None
        assert made.auto_result.measured.kl <= limit
        assert len(made.auto_result.chosen) == 3
        assert made.config.layer_recipes == {
            str(i): o.bit_choice for i, o in enumerate(made.auto_result.chosen)
        }
        auto_facts = made.describe()["auto"]
        assert [row["bit_choice"] for row in auto_facts["layers"]] == list(
            made.config.layer_recipes.values()
        )
        assert set(auto_facts["layers"][0]["kl"]) == {*BIT_CHOICES, UNQUANTIZED_CHOICE}
        sizes.append(made.weight_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1]
    assert set(plan(llama, max_kl=1e-7).config.layer_recipes.values()) == {UNQUANTIZED_CHOICE}
    assert set(plan(llama, max_kl=1e3).config.layer_recipes.values()) == {BIT_CHOICES[0]}


def test_a_rise_of_the_perplexity_is_a_limit_too(llama: Path) -> None:
    made = plan(llama, max_ppl_increase=1.0)
    assert made.auto_result is not None
    assert made.auto_result.measured.log_ppl_rise <= 0.00996
    both = plan(llama, max_ppl_increase=1.0, max_kl=1e-7)
    assert set(both.config.layer_recipes.values()) == {UNQUANTIZED_CHOICE}


def test_the_search_is_the_same_every_time(llama: Path) -> None:
    assert plan(llama, max_kl=1e-3).resume_key() == plan(llama, max_kl=1e-3).resume_key()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_engine_is_built_and_accepted(llama: Path, tmp_path: Path, dtype: str) -> None:
    mixed = {"0": "int4-g32", "1": "int8", "2": "none"}
    options = {k: v for k, v in SMALL.items() if k not in ("target", "quantization")}
    report, written = build_and_accept(
        llama, tmp_path / "e", dtype, "auto", layer_recipes=mixed, **options
    )
    assert written, report.get("reason")
    artifact = open_artifact(tmp_path / "e")
    weight_formats = [
        artifact.manifest.weight_formats[f"layers.{i}.mlp.down_proj"] for i in range(3)
    ]
    assert weight_formats == ["int4", "int8", "dense"]
    assert artifact.tensor("layers.2.mlp.down_proj.weight").dtype is getattr(torch, dtype)
    assert artifact.tensor("layers.0.attn.o_proj.sizes").tolist() == [48, 32]
    made = plan(llama, dtype=dtype, layer_recipes=mixed)
    assert sum(artifact.tensor(name).nbytes for name in artifact.names()) == made.weight_bytes
    assert made.auto_result is None


def test_layers_without_int4_need_no_calibration(llama: Path, tmp_path: Path) -> None:
    made = plan(llama, layer_recipes={"0": "int8"})
    assert made.calibration is None
    report, written = build_and_accept(
        llama, tmp_path / "e", "float32", "auto", layer_recipes={"0": "int8"}
    )
    assert written, report.get("reason")
    assert (
        open_artifact(tmp_path / "e").manifest.weight_formats["layers.1.attn.qkv_proj"] == "dense"
    )


def test_what_the_choice_was_made_on_is_no_text_to_be_judged_by(
    shared: Path, tmp_path: Path
) -> None:
    """Though int8 takes no statistics, the file decided which layers are int8."""
    text = tmp_path / "calibration.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": f"Once upon a time {i} there was a cat."}) + "\n" for i in range(99)
        )
    )
    stories = shared / "data/models/stories260K"
    made = plan(stories, max_kl=1e-4, calibration=str(text))
    assert set(made.config.layer_recipes.values()) <= {"int8", UNQUANTIZED_CHOICE}
    assert made.calibration is None
    assert "not used" not in made.reasons["calibration"]
    build(made, tmp_path / "e", None)
    with pytest.raises(UsageError, match="calibrat"):
        refuse_calibration_file(text, open_artifact(tmp_path / "e").manifest.source)
    # forms that were given by hand follow from no text
    by_hand = plan(stories, layer_recipes={"0": "int8"}, calibration=str(text))
    assert by_hand.quantization_text_source is None


def test_a_rounded_head_is_within_the_limit(llama: Path) -> None:
    for limit in (1e-1, 1e-2):
        made = plan(llama, max_kl=limit, quantize_head=True)
        assert made.auto_result is not None
        assert 0 < made.auto_result.measured.kl <= limit
    with pytest.raises(UsageError, match="--quantize-head"):
        plan(llama, max_kl=1e-9, quantize_head=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a limit: --max-kl"),
        ({"max_kl": 0.0}, "--max-kl must be above 0"),
        ({"max_ppl_increase": float("nan")}, "--max-ppl-increase must be above 0"),
        ({"quantization": "int4", "max_kl": 1.0}, "--max-kl is a limit for -q auto"),
        ({"quantization": "int8", "layer_recipes": {"0": "int8"}}, "--layer-recipe is for -q auto"),
        ({"layer_recipes": {"3": "int8"}}, "3=int8: the layers are 0 to 2"),
        ({"layer_recipes": {"x": "int8"}}, "x=int8: the layers are 0 to 2"),
        (
            {"layer_recipes": {"0": "int5"}},
            "int5 is not one of int4-g128, int4-g64, int4-g32, int8, none",
        ),
    ],
)
def test_what_makes_no_sense_is_named(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        plan(llama, **options)
    assert "\n" not in str(error.value)

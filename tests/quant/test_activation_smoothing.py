"""SmoothQuant: folding changes nothing that is computed, and the search makes the layer err
less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.partition import HeadGroups
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.rotary import RopeSpec
from modelmill.quant import activation_smoothing
from modelmill.quant.awq import can_fold_scales
from modelmill.quant.calibrate import (
    collect_input_statistics,
    quantize_layer,
    weight_output_error,
)
from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.quant.recipe import make_recipe
from modelmill.quant.smoothquant import search_static_input_scale
from modelmill.weights import fp8, w8a8
from modelmill.weights.dense import DenseWeight
from tests.quant.test_calibrate import flow_of, open_model, streams

FAMILIES = ("llama", "llama-bias", "llama-mqa", "gpt2", "qwen2", "qwen3", "qwen")


def recipe_of(**options: Any) -> Any:
    made = make_recipe(BuildConfig(**{"quantization": "smoothquant"} | options))
    assert made is not None
    return made


def collect_layer(model: Any) -> tuple[QuantizableLayer, Any, dict[str, Any]]:
    block, flow = QuantizableLayer(model.layers[0]), flow_of(model, 60, 40)
    probe, statistics = flow.fork(), {}
    for site in block.sites:
        probe.forward_to_site(block, site)
        statistics[site] = collect_input_statistics(probe.site_inputs(), site)
    return block, flow, statistics


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoothed_layer_computes_what_it_did(family: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    block, flow, statistics = collect_layer(model)
    before = flow.fork()
    before.forward_layer(block)
    for alphas in (
        dict.fromkeys(block.sites, 0.5),
        {"o": 1.0, "down": 0.0, "qkv": None, "up": 0.8},
    ):
        folded = activation_smoothing.apply_smoothing(block, statistics, alphas, torch.float32)
        assert set(folded) == {
            s for s in block.sites if alphas[s] is not None and can_fold_scales(block, s)
        }
        after = flow.fork()
        after.forward_layer(block)
        torch.testing.assert_close(streams(after), streams(before), rtol=1e-4, atol=2e-5)
    assert can_fold_scales(block, "down") == (family != "gpt2"), (
        "GPT-2's activation is linear in nothing"
    )


@settings(max_examples=25, deadline=None)
@given(alpha=st.floats(0, 1), seed=st.integers(0, 50), dead=st.integers(0, 31))
def test_smoothers_are_the_formula_up_to_a_common_factor(
    alpha: float, seed: int, dead: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    block = _plain_block(draw)
    peak = torch.rand(32, generator=draw) * 10 ** torch.randn(32, generator=draw)
    peak[dead] = 0.0
    scales = activation_smoothing.smoothing_scales(block, "qkv", peak, alpha)
    weight = block.stacked_site_weight("qkv").abs().amax(0)
    plain = peak**alpha / weight.clamp(min=1e-5) ** (1 - alpha)
    ratio = (scales / plain)[peak > 0]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)
    assert float(scales[dead]) == 1.0
    assert bool((scales >= activation_smoothing.MIN_SCALE).all())
    tied = activation_smoothing.smoothing_scales(block, "o", peak, alpha).view(2, 2, 8)
    assert torch.equal(tied[:, 0], tied[:, 1]), "one vector for all q heads of a KV head"


def _plain_block(draw: torch.Generator) -> QuantizableLayer:
    """A decoder layer of width 32, 4 q heads of 8 over 2 KV heads."""
    config = DecoderConfig(
        hidden=32, inner=16, layers=1, heads=4, kv_heads=2, head_dim=8, vocab=8, eps=1e-6,
        max_len=8, rope=RopeSpec(8, 1e4, 8),
    )  # fmt: skip
    block = QuantizableLayer(PreNormLayer(config.layer_parts(0), 0))
    for linear in block.all_linears().values():
        linear.weight = DenseWeight(torch.randn(linear.shape, generator=draw))
    return block


def test_maxima_are_taken_over_the_heads_of_a_group() -> None:
    groups = HeadGroups(4, 2, 8)
    peak = torch.arange(1.0, 33.0)
    assert torch.equal(activation_smoothing.max_over_kv_group(groups, peak)[:8], peak[8:16])
    assert torch.equal(activation_smoothing.max_over_kv_group(groups, peak)[16:24], peak[24:32])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_search_errs_less_and_leaves_the_layer_as_it_was(family: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    block, _, _ = collect_layer(model)
    norm = block.producer_norm("qkv")
    assert norm is not None
    scales = torch.ones(norm.weight.shape)
    scales[3] = 40.0  # a channel that the norm makes large and the weight small
    from modelmill.quant.awq import fold_scales

    fold_scales(block, "qkv", 1 / scales, torch.float32)
    block, flow, statistics = collect_layer(model)
    weights = {path: linear.weight for path, linear in block.all_linears().items()}
    trial = activation_smoothing.SmoothingTrial(
        block, statistics, flow, torch.float32, recipe_of()._quantize_layer
    )
    alphas, error, plain = activation_smoothing.search_smoothing_alphas(trial)
    assert all(linear.weight is weights[path] for path, linear in block.all_linears().items())
    assert error < 0.8 * plain
    assert alphas["qkv"] is not None
    assert trial.measure_output_error(alphas) == pytest.approx(error)
    assert trial.measure_output_error(dict.fromkeys(block.sites)) == pytest.approx(plain)


def test_a_layer_beyond_the_limit_keeps_some_activations(tmp_path: Path) -> None:
    model = open_model("llama", tmp_path)
    errors = {}
    for limit in (None, 1e-9):
        block, flow, _ = collect_layer(model)
        with activation_smoothing.restore_layer_on_exit(block):
            recipe = recipe_of(max_layer_error=limit)
            facts, _ = quantize_layer(
                block, recipe, flow, dtype=torch.float32, layer_name="layers.0"
            )
            floats = {name for name, fact in facts.items() if fact["activations"] == 16}
            assert len(floats) == (0 if limit is None else 4)
            weight = block.linear_by_path("mlp.down_proj").weight
            assert isinstance(weight, w8a8.W8A8Weight)
            assert weight.float_input == (limit is not None)
            errors[limit] = facts["mlp.down_proj"]["layer_error"]
    assert errors[1e-9] < errors[None]


@pytest.mark.parametrize("format_class", [w8a8.W8A8Weight, fp8.Fp8Weight])
def test_a_static_scale_is_the_best_of_those_tried(format_class: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 48, generator=draw)
    x[7, 5] = 400.0  # one value that would cost all others their bits
    weight = torch.randn(20, 48, generator=draw)
    statistics = collect_input_statistics([x], "x", needs_hessian=False)
    assert statistics.hessian.numel() == 0
    packed = format_class.pack(weight, torch.float32)
    searched = search_static_input_scale(weight, packed, statistics)
    assert float(searched.input_scale) > 0
    max_scaled = format_class.from_values_and_scales(
        packed.weight,
        packed.scale,
        statistics.max_abs.max().view(1) / (127 if format_class is w8a8.W8A8Weight else 448),
    )
    assert weight_output_error(weight, searched, statistics) <= weight_output_error(
        weight, max_scaled, statistics
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": "1.5"}, "--alpha"),
        ({"alpha": "much"}, "--alpha"),
        ({"max_layer_error": 0.0}, "--max-layer-error"),
        ({"activation_scales": "none"}, "-q int8"),
        ({"weight_scales": "group"}, "--weight-scales"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildConfig(**{"quantization": "smoothquant"} | options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_no_numbers_are_named_without_moments_too(bad: float) -> None:
    x = torch.ones(8, 4)
    x[3, 1] = bad
    with pytest.raises(UsageError, match="NaN"):
        collect_input_statistics([x], "layers.0.attn.qkv_proj", needs_hessian=False)

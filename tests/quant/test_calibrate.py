"""Calibration: a layer's inputs, what folding keeps, errors for bad data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.store import open_artifact
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.loader.model_loader import load_model
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.linear import Linear
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.rotary import RopeSpec
from modelmill.ops import registry
from modelmill.quant.awq import (
    average_over_kv_group,
    awq_scales_for_alpha,
    can_fold_scales,
    fold_scales,
    search_and_fold_scales,
    search_awq_scales,
)
from modelmill.quant.calibrate import (
    collect_input_statistics,
    quantize_layer,
)
from modelmill.quant.calibration_state import (
    CalibrationState,
    QuantizableLayer,
    route_all_tokens_to_rare_experts,
)
from modelmill.quant.recipe import make_recipe, recipe_names
from tests.accept.build_and_accept import save_tiny

FAMILIES = ("llama", "llama-bias", "gpt2", "qwen3", "qwen")


def open_model(family: str, folder: Path) -> Any:
    """The model of a tiny engine in float32."""
    plan = make_build_plan(
        open_checkpoint(save_tiny(family, folder / "hf")), BuildConfig(target="cpu")
    )
    build(plan, folder / "engine", None)
    return load_model(open_artifact(folder / "engine"), "cpu")


def decoder_layer() -> PreNormLayer:
    """A layer without weights: 6 query heads of 4 over 2 KV heads."""
    sizes = {"hidden": 24, "inner": 32, "layers": 1, "heads": 6, "kv_heads": 2, "head_dim": 4}
    config = DecoderConfig(**sizes, vocab=8, eps=1e-6, max_len=8, rope=RopeSpec(4, 1e4, 8))
    return PreNormLayer(config.layer_parts(0), 0)


def drawn_ids(vocab: int, *lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=draw).tolist() for n in lengths]


def flow_of(model: Any, *lengths: int) -> CalibrationState:
    return CalibrationState.from_ids(
        model, drawn_ids(int(model.config.vocab), *lengths), registry.select_backends("cpu"), "cpu"
    )


def streams(flow: CalibrationState) -> torch.Tensor:
    """The residual streams of all tokens."""
    return torch.cat([b.x if b.residual is None else b.x + b.residual for b in flow.batches])


def test_what_rounding_costs_before_does_not_hang_on_the_method(tmp_path: Path) -> None:
    """AWQ has scaled the weights when they are rounded: plain rounding of those is not what is
    compared with.
    """
    model = open_model("llama", tmp_path)
    errors_before = []
    for method in ("gptq", "awq", "awq+gptq"):
        weights = {
            name: linear.weight
            for name, linear in model.layers[0].named_modules()
            if isinstance(linear, Linear)
        }
        recipe = make_recipe(BuildConfig(quantization="int4", method=method, group_size=32))
        assert recipe is not None
        norms = {name: t.clone() for name, t in model.layers[0].named_buffers()}
        block = QuantizableLayer(model.layers[0])
        facts, _ = quantize_layer(
            block, recipe, flow_of(model, 60, 70), dtype=torch.float32, layer_name="layers.0"
        )
        errors_before.append(facts["attn.qkv_proj"]["before"])
        for name, weight in weights.items():
            model.layers[0].get_submodule(name).weight = weight
        for name, t in norms.items():
            module, _, leaf = name.rpartition(".")
            setattr(model.layers[0].get_submodule(module), leaf, t)
    assert errors_before[0] == errors_before[1] == errors_before[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_arrive_as_in_a_forward_pass(family: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    flow = flow_of(model, 7, 40, 1, 33)
    step = flow.batches[0].step
    expected: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda _, __, out: expected.append(out[1]))
    wide = CalibrationState.from_ids(
        model,
        drawn_ids(int(model.config.vocab), 7, 40, 1, 33),
        registry.select_backends("cpu"),
        "cpu",
    )
    # a forward computes its layers one after another, so that the pages of one layer serve it, too
    model(wide.batches[0].step)
    hook.remove()
    for layer in model.layers:
        flow.forward_layer(QuantizableLayer(layer))
    assert len(flow.batches) == 1
    assert flow.num_tokens == len(step.ids) == 81
    torch.testing.assert_close(streams(flow), expected[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_keeps_what_the_layer_computes(family: str, tmp_path: Path) -> None:
    model = open_model(family, tmp_path)
    block, flow = QuantizableLayer(model.layers[1]), flow_of(model, 30, 20)
    flow.forward_layer(QuantizableLayer(model.layers[0]))
    before, at_sites, factors = flow.fork(), {}, {}
    for site in block.sites:
        before.forward_to_site(block, site)
        at_sites[site] = torch.cat(list(before.site_inputs()))
    before.forward_to_layer_end(block)
    draw = torch.Generator().manual_seed(0)
    assert block.sites == ("qkv", "o", "up", "down")
    order = ("o", "qkv", "up") if family == "gpt2" else ("o", "down", "qkv", "up")
    assert block.spec.scale_fold_order == order
    assert not can_fold_scales(block, "down") or family != "gpt2"
    for site in order:
        scales = torch.rand(block.stacked_site_weight(site).shape[1], generator=draw) * 3 + 0.3
        factors[site] = fold_scales(
            block, site, average_over_kv_group(block, site, scales), torch.float32
        )
    for site in block.sites:
        flow.forward_to_site(block, site)
        site_input = torch.cat(list(flow.site_inputs())) * factors.get(site, 1.0)
        torch.testing.assert_close(site_input, at_sites[site], rtol=1e-3, atol=1e-4)
    flow.forward_to_layer_end(block)
    torch.testing.assert_close(streams(flow), streams(before), rtol=1e-3, atol=1e-3)


def test_what_rounds_a_norm_is_given_to_the_columns(tmp_path: Path) -> None:
    model = open_model("llama", tmp_path)
    block = QuantizableLayer(model.layers[0])
    before = block.stacked_site_weight("qkv") * model.layers[0].attn_norm.weight
    fold_scales(block, "qkv", torch.linspace(0.7, 1.9, 48), torch.bfloat16)
    norm = block.layer.attn_norm.weight
    assert torch.equal(norm.bfloat16().float(), norm)
    torch.testing.assert_close(block.stacked_site_weight("qkv") * norm, before)


def test_heads_that_share_keys_share_scales() -> None:
    block = QuantizableLayer(decoder_layer())
    tied = average_over_kv_group(block, "o", torch.arange(24.0)).view(2, 3, 4)
    assert torch.equal(tied[:, 0], tied[:, 1])
    assert torch.equal(tied[0, 0], torch.arange(24.0).view(2, 3, 4)[0].mean(0))
    vector = torch.arange(24.0)
    assert average_over_kv_group(QuantizableLayer(decoder_layer()), "qkv", vector) is vector


def test_scales_follow_the_formula() -> None:
    mean = torch.tensor([1.0, 16.0, 4.0])
    assert torch.equal(awq_scales_for_alpha(mean, 0.0), torch.ones(3))
    torch.testing.assert_close(awq_scales_for_alpha(mean, 0.5), mean.sqrt() / 2)


def test_awq_scales_the_channel_that_matters() -> None:
    """One input channel is large and its weights are small beside the others in their group."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(400, 64, generator=draw), torch.randn(32, 64, generator=draw)
    x[:, 3] *= 60
    weight[:, 3] *= 0.2

    def round_to_step(wide: torch.Tensor, _: Any) -> torch.Tensor:
        step = wide.abs().amax(1, keepdim=True) / 7
        return (wide / step).round() * step

    scales, alpha, share = search_awq_scales(
        weight, collect_input_statistics([x], "here"), round_to_step
    )
    assert alpha > 0
    assert share < 0.5
    assert int(scales.argmax()) == 3


def test_statistics_are_the_same_however_the_tokens_are_batched() -> None:
    x = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    one, many = (
        collect_input_statistics([x], "here"),
        collect_input_statistics(list(x.split(70)), "here"),
    )
    assert many.num_tokens == 300
    for name in ("hessian", "mean_abs", "max_abs", "min_values", "max_values"):
        torch.testing.assert_close(getattr(many, name), getattr(one, name))
    torch.testing.assert_close(one.hessian, x.T @ x / 300)
    assert torch.equal(one.min_values, x.amin(0))
    assert torch.equal(one.max_abs, x.abs().amax(0))
    assert torch.equal(one.input_samples, many.input_samples)


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_a_method_errs_less_than_nearest(method: str, tmp_path: Path) -> None:
    model = open_model("llama", tmp_path)
    recipe = make_recipe(BuildConfig(quantization="int4", method=method, group_size=32))
    assert recipe is not None
    facts, scales = quantize_layer(
        QuantizableLayer(model.layers[0]),
        recipe,
        flow_of(model, 100, 90),
        dtype=torch.float32,
        layer_name="layers.0",
    )
    assert list(facts) == ["attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert all(fact["after"] < fact["before"] for fact in facts.values())
    assert all(len(fact["outliers"]) == 4 for fact in facts.values())
    assert bool(scales) <= method.startswith("awq")
    # 48 columns: a row's second group is half a group, and its last 16 bytes are half used
    assert facts["attn.qkv_proj"]["bits"] == pytest.approx(
        (32 * 8 + 2 * 32) / 48 + 64 / (96 * 48), abs=2e-3
    )
    assert model.layers[0].mlp.down_proj.weight.format == "int4"


def test_a_layer_sees_what_the_quantized_ones_before_computed(tmp_path: Path) -> None:
    model = open_model("llama", tmp_path)
    exact, flow = flow_of(model, 100, 90), flow_of(model, 100, 90)
    exact.forward_layer(QuantizableLayer(model.layers[0]))
    recipe = make_recipe(BuildConfig(quantization="int4", method="gptq", group_size=32))
    assert recipe is not None
    quantize_layer(
        QuantizableLayer(model.layers[0]),
        recipe,
        flow,
        dtype=torch.float32,
        layer_name="layers.0",
    )
    again = flow_of(model, 100, 90)
    again.forward_layer(QuantizableLayer(model.layers[0]))
    assert torch.equal(streams(again), streams(flow)), (
        "passing by a finished layer gives the same bits"
    )
    assert not torch.allclose(streams(flow), streams(exact), rtol=1e-3)


@pytest.mark.parametrize(
    ("path", "source", "place"),
    [
        ("attn.core", "attn.core", "layers.0.attn.o_proj"),
        ("mlp.down_proj", "mlp.down_proj", "the end of layers.0"),
    ],
)
def test_a_module_that_makes_no_numbers_is_named(
    path: str, source: str, place: str, tmp_path: Path
) -> None:
    model = open_model("llama", tmp_path)
    module = model.layers[0].get_submodule(path)
    module.register_forward_hook(lambda *args: args[2] * float("nan"))
    recipe = make_recipe(BuildConfig(quantization="int4", method="gptq", group_size=32))
    assert recipe is not None
    message = f"layer 0, module {source}: the calibration data makes NaN or infinite inputs at"
    with pytest.raises(UsageError, match=re.escape(f"{message} {place}")):
        quantize_layer(
            QuantizableLayer(model.layers[0]),
            recipe,
            flow_of(model, 100, 90),
            dtype=torch.float32,
            layer_name="layers.0",
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_no_numbers_are_named_with_their_place(bad: float) -> None:
    x = torch.ones(8, 4)
    x[3, 1] = bad
    with pytest.raises(UsageError, match=r"layers\.3\.mlp"):
        collect_input_statistics([torch.ones(8, 4), x], "layers.3.mlp.down_proj")


def test_the_folder_is_the_registry() -> None:
    assert {"none", "int8", "int4"} <= set(recipe_names())
    assert not {"recipe", "calibrate", "grid", "gptq", "awq", "block"} & set(recipe_names())
    assert make_recipe(BuildConfig()) is None
    assert search_and_fold_scales.__module__ == "modelmill.quant.awq"


def test_an_expert_with_few_tokens_is_calibrated_on_all_of_them() -> None:
    draw = torch.Generator().manual_seed(0)
    routing = torch.zeros(200, 3)
    routing[:, 0] = torch.rand(200, generator=draw)
    routing[:70, 1] = 0.5
    routing[:5, 2] = 0.25
    more = route_all_tokens_to_rare_experts(routing)
    assert (more > 0).sum(0).tolist() == [200, 70, 200]
    assert torch.equal(more[:5], routing[:5])
    outputs = torch.randn(200, 3, generator=draw)
    assert torch.equal((more * outputs).sum(1), (routing * outputs).sum(1))

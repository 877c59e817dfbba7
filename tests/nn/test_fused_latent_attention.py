"""Fused layers with latent attention: the logits and the cache of the plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.models import deepseek_v3
from modelmill.nn.fusion import FusedCausalLM, FusedLatentAttention, fuse_model
from modelmill.nn.step import Step
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from tests.models.families.deepseek_v3 import CASE
from tests.nn.test_fused_ops import own_cache
from tests.nn.torch_calls import ComputingCalls, uncounted

STEPS: dict[str, list[tuple[int, int, int]]] = {
    "decode": [(3, 1, 20)],
    "prompt": [(1, 9, 9)],
    "mixed": [(2, 17, 17), (2, 1, 30)],
    "chunk": [(1, 9, 20)],
}


def model(**changes: Any) -> Any:
    """A seeded DeepSeek-V3, its first layer without experts."""
    config = deepseek_v3.config_from_hf(CASE.raw(first_k_dense_replace=1, **changes))
    return fill_random_weights(deepseek_v3.Model(config), {}, torch.float32, "cpu")


def with_references(step: Step, *names: str, serves: bool = True) -> tuple[Step, list[str]]:
    """The step with the references of fused ops, and which were called."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return registry.reference(name)(*args) if serves else None

        return call

    return replace(step, ops=step.ops.replace({name: counted(name) for name in names})), calls


@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None}, {"rope_interleave": False}], ids=str
)
@torch.inference_mode()
def test_the_logits_and_the_cache_are_those_of_the_plain_modules(
    changes: dict[str, Any], sequences: list[tuple[int, int, int]]
) -> None:
    plain = model(**changes)
    fused = fuse_model(plain)
    assert isinstance(fused, FusedCausalLM)
    step = own_cache(synthetic_step(plain, registry.select_backends("cpu"), sequences))
    expected = plain(step)
    other, calls = with_references(own_cache(step), "latent_rope_cache", "linear_add")
    actual = fused(other)
    layers = len(plain.layers)
    assert calls.count("latent_rope_cache") == layers
    assert calls.count("linear_add") >= layers
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for fused_pages, pages in zip(other.kv.k, step.kv.k, strict=True):
        torch.testing.assert_close(fused_pages, pages, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_where_the_op_is_missing_or_declines_the_plain_modules_run() -> None:
    plain = model()
    fused = fuse_model(plain)
    step = own_cache(synthetic_step(plain, registry.select_backends("cpu"), STEPS["decode"]))
    assert step.ops.latent_rope_cache is None
    expected = plain(step)
    assert torch.equal(fused(step), expected)
    declining, calls = with_references(step, "latent_rope_cache", serves=False)
    assert torch.equal(fused(declining), expected)
    assert len(calls) == len(plain.layers)


def test_names_and_leaves_are_those_of_the_plain_modules() -> None:
    plain = model()
    fused = fuse_model(plain)
    names = {name for name, _ in plain.named_modules()}
    assert {name for name, _ in fused.named_modules()} == names
    assert isinstance(fused.get_submodule("layers.0.attn"), FusedLatentAttention)
    path = "layers.0.attn.kv_a_proj"
    assert fused.get_submodule(path) is plain.get_submodule(path)


@torch.inference_mode()
def test_what_is_the_same_for_all_layers_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of prompts beside single queries: places, tables and the step of the latter."""
    from modelmill.nn import latent_prompt_expansion
    from modelmill.ops.latent_rope_cache import SlotPageIndices

    plain, calls = model(), []
    single, places = (
        latent_prompt_expansion.select_single_token_sequences,
        SlotPageIndices.from_slots,
    )

    def counted(name: str, call: Any) -> Any:
        return lambda *args: calls.append(name) or call(*args)

    monkeypatch.setattr(
        latent_prompt_expansion, "select_single_token_sequences", counted("queries", single)
    )
    monkeypatch.setattr(SlotPageIndices, "from_slots", counted("places", places))
    plain(synthetic_step(plain, registry.select_backends("cpu"), STEPS["mixed"]))
    assert len(plain.layers) > 1
    assert sorted(calls) == ["places", "queries"]


@torch.inference_mode()
def test_a_decode_step_of_a_layer_computes_little_beside_its_ops() -> None:
    """Queries absorb the keys' projections, are joined, and outputs absorb those of the values."""
    plain = model()
    layer = fuse_model(plain).get_submodule("layers.0.attn")
    step = own_cache(synthetic_step(plain, registry.select_backends("cpu"), STEPS["decode"]))
    rope, x = plain.compute_rope_cos_sin(step), plain.embed(step.ids, step)

    names = ("rms_norm", "linear", "paged_attention", "latent_rope_cache")
    step = replace(step, ops=uncounted(step.ops, names))
    with ComputingCalls() as calls:
        layer(x, x, rope, step)
    assert calls.names == ["bmm", "cat", "bmm", "flatten"]

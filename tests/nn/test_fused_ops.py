"""Ops that fuse a product with its neighbours: the logits of the single ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.nn.decoder import Decoder
from modelmill.nn.fusion import fuse_model
from modelmill.nn.step import Step
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from tests.runtime import tiny

FUSED_OPS = ("linear_swiglu", "linear_add", "qkv_rope_cache")


def decoder(**more: Any) -> Any:
    """The tiny decoder with other switches."""
    return fill_random_weights(
        Decoder(replace(tiny.decoder().config, **more)), {}, torch.float32, "cpu"
    )


def step_and_calls(
    model: Any, ops_used: tuple[str, ...], serves: bool = True
) -> tuple[Step, list[str]]:
    """A prompt's step whose ops have these ops_used; which of them were called."""
    calls: list[str] = []

    def joined(op: str) -> Any:
        def call(*args: Any) -> Any:
            calls.append(op)
            return registry.reference(op)(*args) if serves or op == "linear_swiglu" else None

        return call

    ops = registry.select_backends("cpu", {"decode": "torch"}).replace(
        {op: joined(op) for op in ops_used}
    )
    return synthetic_step(model, ops, (2, 11, 11)), calls


def own_cache(step: Step) -> Step:
    """The same over a copy of the cache."""
    cache = step.kv
    copies = {name: tuple(each.clone() for each in getattr(cache, name)) for name in ("k", "v")}
    return replace(step, kv=replace(cache, **copies))


@pytest.mark.parametrize("ops_used", [(op,) for op in FUSED_OPS] + [FUSED_OPS], ids="+".join)
@pytest.mark.parametrize("options", [{}, {"qkv_bias": False, "out_bias": True, "logn": 4}], ids=str)
@torch.inference_mode()
def test_the_logits_and_the_cache_are_those_of_single_ops(
    ops_used: tuple[str, ...], options: dict[str, Any]
) -> None:
    model = decoder(**options)
    step, calls = step_and_calls(model, ops_used)
    fused, plain = own_cache(step), own_cache(step)
    actual, expected = fuse_model(model)(fused), model(plain)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for cache, reference in zip(
        (*fused.kv.k, *fused.kv.v), (*plain.kv.k, *plain.kv.v), strict=True
    ):
        torch.testing.assert_close(cache, reference, rtol=1e-4, atol=1e-5)
    assert set(calls) == set(ops_used)


@torch.inference_mode()
def test_what_an_op_does_not_serve_is_done_by_the_single_ones() -> None:
    model = decoder()
    step, calls = step_and_calls(model, FUSED_OPS, serves=False)
    expected = model(own_cache(step))
    assert not calls, "the plain modules call no fused op"
    torch.testing.assert_close(fuse_model(model)(step), expected, rtol=1e-4, atol=1e-5)
    assert set(calls) == set(FUSED_OPS)

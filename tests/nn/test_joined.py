"""Ops that join a product with what follows it: the logits of the single ops, which whoever watches meets instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.nn.decoder import Decoder
from modelmill.nn.step import Step
from modelmill.nn.trial import draw_weights, trial_step
from modelmill.ops import shelf
from tests.runtime import tiny

JOINS = ("gated_linear", "add_linear", "rope_linear")


def decoder(**more: Any) -> Any:
    """The tiny decoder with other switches."""
    return draw_weights(Decoder(replace(tiny.decoder().config, **more)), {}, torch.float32, "cpu")


def step_and_calls(model: Any, joins: tuple[str, ...], serves: bool = True) -> tuple[Step, list[str]]:
    """A prompt's step whose ops have these joins; which of them were called."""
    calls: list[str] = []

    def joined(op: str) -> Any:
        def call(*args: Any) -> Any:
            calls.append(op)
            return shelf.reference(op)(*args) if serves or op == "gated_linear" else None

        return call

    ops = replace(shelf.resolve("cpu", {"decode": "torch"}), **{op: joined(op) for op in joins})
    return trial_step(model, ops, (2, 11, 11)), calls


def own_cache(step: Step) -> Step:
    """The same over a copy of the cache."""
    cache = step.kv
    copies = {name: tuple(each.clone() for each in getattr(cache, name)) for name in ("k", "v")}
    return replace(step, kv=replace(cache, **copies))


@pytest.mark.parametrize("joins", [(op,) for op in JOINS] + [JOINS], ids="+".join)
@pytest.mark.parametrize("kind", [{}, {"qkv_bias": False, "out_bias": True, "logn": 4}], ids=str)
@torch.inference_mode()
def test_the_logits_and_the_cache_are_those_of_single_ops(joins: tuple[str, ...], kind: dict[str, Any]) -> None:
    model = decoder(**kind)
    step, calls = step_and_calls(model, joins)
    whole, watched = own_cache(step), replace(own_cache(step), whole=False)
    found, expected = model(whole), model(watched)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip((*whole.kv.k, *whole.kv.v), (*watched.kv.k, *watched.kv.v), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert set(calls) == set(joins)


@torch.inference_mode()
def test_what_an_op_does_not_serve_is_done_by_the_single_ones() -> None:
    model = decoder()
    step, calls = step_and_calls(model, JOINS, serves=False)
    expected = model(replace(own_cache(step), whole=False))
    torch.testing.assert_close(model(step), expected, rtol=1e-4, atol=1e-5)
    assert set(calls) == set(JOINS)

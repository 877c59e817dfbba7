"""The step of prompts beside answers that step.py times."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import model_step as timed
from benchmarks.model_shapes import MOE_SHAPES
from modelmill.loader.model_loader import build_model
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.synthetic_step import fill_random_weights
from tests.runtime import tiny


def test_prompts_are_cut_into_pieces_and_answers_stand_behind_them() -> None:
    [sizes] = timed.parse_mixed_sizes("1100+7x40")
    made = timed.mixed_step(tiny.decoder(), sizes, "int8", {})
    assert made.query_start.diff().tolist() == [512, 512, 76, *[1] * 7]
    assert made.context_lens.tolist() == [512, 512, 76, *[40] * 7]
    assert made.kv.k[0].dtype == torch.int8
    assert timed.greedy_ids(tiny.decoder(), made).shape == (10,)


def test_several_are_separated_by_commas() -> None:
    assert list(timed.parse_mixed_sizes("768+230x1000,100+8x64")) == [
        (768, 230, 1000),
        (100, 8, 64),
    ]


def test_a_step_reads_the_chosen_experts_only() -> None:
    spec = MoESpec(RouterConfig(experts=4, top_k=2), MLPSpec(hidden=32, inner=16))
    moe = fill_random_weights(spec.build_module(), {}, torch.float32, "cpu")
    one = 4 * 3 * 32 * 16  # bytes of an expert
    assert timed.weight_bytes(moe, 1) == 2 * one
    assert timed.weight_bytes(moe, 2) == 3 * one
    assert timed.weight_bytes(moe, 64) == pytest.approx(4 * one)


def test_keys_behind_a_window_are_not_read() -> None:
    mixed = build_model("gpt_oss", MOE_SHAPES["gpt-oss-20b"]).kv
    assert timed.tokens_read(mixed, 100) == 100
    assert timed.tokens_read(mixed, 1024) == (1024 + 128) / 2
    dense = build_model("qwen3_moe", MOE_SHAPES["qwen3-30b-a3b"]).kv
    assert timed.tokens_read(dense, 1024) == 1024


@pytest.mark.parametrize(("shape", "billions"), [("gpt-oss-20b", 20.9), ("qwen3-30b-a3b", 30.5)])
def test_mixtures_have_the_parameters_of_the_published_ones(shape: str, billions: float) -> None:
    raw = MOE_SHAPES[shape]
    model = build_model(str(raw["model_type"]), raw)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    count = sum(math.prod(linear.shape) for linear in linears)
    count += sum(buffer.numel() for buffer in model.buffers())
    assert count / 1e9 == pytest.approx(billions, abs=0.06)

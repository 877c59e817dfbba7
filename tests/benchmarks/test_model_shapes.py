"""Bytes and operations of published shapes."""

from __future__ import annotations

import pytest

from benchmarks.model_shapes import SHAPES, shape_cost

PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134.5e6,
    "gpt2-medium": 354.8e6,
    "qwen2.5-0.5b": 494.0e6,
    "qwen2.5-1.5b": 1543.7e6,
    "llama-7b": 6738.4e6,
    "qwen2.5-7b": 7615.6e6,
    "qwen-7b": 7721.3e6,
    "llama-3-8b": 8030.3e6,
    "qwen3-8b": 8190.7e6,
}
"""Parameter counts of the published checkpoints, from their model cards' safetensors sizes."""


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_the_published_ones(shape: str) -> None:
    count = shape_cost(SHAPES[shape]).weight_bytes / 2
    assert count == pytest.approx(PUBLISHED_PARAMETERS[shape], rel=1e-3)


def test_a_step_reads_everything_but_a_table_that_is_no_head() -> None:
    tied, untied = (shape_cost(SHAPES[name]) for name in ("qwen2.5-0.5b", "llama-3-8b"))
    assert tied.step_bytes == tied.weight_bytes
    assert untied.step_bytes == untied.weight_bytes - 2 * 128256 * 4096
    assert untied.head_weights == 128256 * 4096


def test_grouped_queries_keep_fewer_keys() -> None:
    # 32 layers of 8 heads of 128 channels, keys and values, 2 bytes
    assert shape_cost(SHAPES["llama-3-8b"]).kv_bytes == 32 * 8 * 128 * 2 * 2
    assert shape_cost(SHAPES["llama-7b"]).kv_bytes == 32 * 4096 * 2 * 2
    assert shape_cost(SHAPES["gpt2-medium"]).kv_bytes == 24 * 1024 * 2 * 2


def test_a_prompt_multiplies_the_layers_for_each_token_and_the_head_once() -> None:
    cost = shape_cost(SHAPES["llama-7b"])
    assert cost.prefill_operations(10) == 2 * (10 * cost.layer_weights + 32000 * 4096)
    assert cost.layer_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert cost.decode_bytes(2, 100) == cost.step_bytes + 200 * cost.kv_bytes

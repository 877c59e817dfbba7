"""What a call must move and compute, against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.eval.op_cases import bench_cases
from modelmill.eval.op_cost import OpCost, count_attended_keys_and_pairs, op_cost
from modelmill.ops import registry
from modelmill.ops.int8_linear import quantize
from modelmill.ops.paged_attention import PagedAttentionInputs
from tests.runtime.tiny import decoder


def cost_of(op: str, **args: Any) -> OpCost:
    called_with = registry.op_declarations()[op].pack_named_inputs(args)
    return op_cost(op, (), called_with, registry.reference(op)(**called_with))


def test_a_product_reads_its_weight_once() -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(128, 64), torch.randn(128)
    cost = cost_of("linear", x=x, weight=weight, bias=bias)
    assert cost == OpCost(
        4 * (3 * 64 + 128 * 64 + 128 + 3 * 128), 4 * (128 * 64 + 128), 2 * 3 * 64 * 128
    )
    assert op_cost("linear", (x, weight), {}, torch.empty(3, 128)).unavoidable_bytes == 4 * 128 * 64
    gated = cost_of("linear_swiglu", x=x, weight=weight)
    assert gated == OpCost(4 * (3 * 64 + 128 * 64 + 3 * 64), 4 * 128 * 64, 2 * 3 * 64 * 128)


def test_a_weight_of_8_bits_is_a_quarter_with_its_scales() -> None:
    x, (weight, scale) = torch.randn(1, 64), quantize(torch.randn(128, 64))
    cost = cost_of("int8_linear", x=x, weight=weight, scale=scale)
    assert cost == OpCost(4 * 64 + 128 * 64 + 4 * 128 + 4 * 128, 128 * 64 + 4 * 128, 2 * 64 * 128)


def test_operations_of_8_bits_are_counted_apart() -> None:
    x, scale = torch.ones(3, 64, dtype=torch.int8), torch.ones(128)
    weight = torch.ones(128, 64, dtype=torch.int8)
    args = {"weight": weight, "scale": scale, "x_scale": torch.ones(3), "dtype": torch.float32}
    cost = cost_of("w8a8_linear", x=x, **args)
    assert cost.int8_operations == cost.operations == 2 * 3 * 64 * 128
    assert cost.ops_by_8bit_dtype == {"int8": cost.operations}
    eight = {"weight": weight.to(torch.float8_e4m3fn), "scale": scale, "dtype": torch.float32}
    narrow = cost_of("fp8_linear", x=x.to(torch.float8_e4m3fn), x_scale=torch.ones(3), **eight)
    wide = cost_of("fp8_linear", x=x.float(), x_scale=None, **eight)
    assert (narrow.fp8_operations, wide.ops_by_8bit_dtype) == (narrow.operations, {})
    total = cost + narrow + wide
    assert total.ops_by_8bit_dtype == {"int8": cost.operations, "float8_e4m3fn": narrow.operations}
    assert total.operations == 3 * cost.operations


def test_attention_reads_each_key_once() -> None:
    """Decoding and a prompt together: contexts of 5 and 3, of which 1 and 3 tokens are new; 2 KV
    heads of 8.
    """
    q, cache = torch.randn(4, 4, 8), torch.randn(2, 2, 16, 8)
    args: dict[str, Any] = {
        "q": q,
        "k_cache": cache,
        "v_cache": cache.clone(),
        "block_tables": torch.tensor([[0], [1]], dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 4], dtype=torch.int32),
        "context_lens": torch.tensor([5, 3], dtype=torch.int32),
        "max_query": 3,
        "max_context": 5,
        "scale": 1.0,
    }
    cost = cost_of("paged_attention", **args)
    read = 2 * (5 + 3) * 2 * 8 * 4
    assert cost.unavoidable_bytes == read
    assert cost.nbytes == read + 2 * q.nbytes
    assert cost.operations == 4 * 4 * 8 * (5 + (1 + 2 + 3))
    latent = cost_of("paged_attention", **args | {"value_dim": 6})
    assert latent.unavoidable_bytes == read // 2
    assert latent.operations == 2 * 4 * (8 + 6) * (5 + (1 + 2 + 3))


@given(st.integers(1, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_attended_is_what_a_mask_shows(new: int, before: int, window: int | None) -> None:
    context = new + before
    row, column = torch.arange(before, context)[:, None], torch.arange(context)[None]
    mask = (column <= row) & (column > row - (window or context + 1))
    assert count_attended_keys_and_pairs([new], [context], window) == (
        int(mask.any(0).sum()),
        int(mask.sum()),
    )


def test_a_cache_of_8_bits_counts_its_scales() -> None:
    """One token, one head of 8: 8 bytes and a float32, for keys and for values."""
    args = {
        "q": torch.randn(1, 1, 8),
        "k_cache": torch.zeros(1, 1, 16, 8, dtype=torch.int8),
        "query_start": torch.tensor([0, 1]),
        "context_lens": torch.tensor([1]),
    }
    named = {
        "v_cache": args["k_cache"],
        "block_tables": torch.zeros(1, 1),
        "max_query": 1,
        "max_context": 1,
        "scale": 1.0,
    }
    called_with = {"inputs": PagedAttentionInputs(**{**args, **named})}
    cost = op_cost("paged_attention", (), called_with, torch.empty(1, 8))
    assert cost.unavoidable_bytes == 2 * (8 + 4)


def test_a_projection_that_is_rotated_and_stored_counts_no_stop_between() -> None:
    """Three tokens of 16 columns to two heads of queries and one each of keys and values, 8
    wide.
    """
    cache, angles = torch.zeros(1, 1, 16, 8), torch.zeros(3, 4)
    x, weight, bias = torch.randn(3, 16), torch.randn(32, 16), torch.randn(32)
    args = {"k_cache": cache, "v_cache": cache.clone(), "slots": torch.arange(3), "heads": 2}
    cost = cost_of(
        "qkv_rope_cache", x=x, weight=weight, bias=bias, cos=angles.cos(), sin=angles.sin(), **args
    )
    weight_bytes = weight.nbytes + bias.nbytes
    assert cost == OpCost(
        x.nbytes + 2 * angles.nbytes + weight_bytes + 3 * 32 * 4, weight_bytes, 2 * 3 * 16 * 32
    )


def test_latent_rows_are_read_and_stored_and_the_ends_of_queries_rotated() -> None:
    """Three tokens, a latent vector of 8, 4 rotated channels; of queries of 12, two heads, only
    these are read and written.
    """
    q, latent, weight = torch.randn(3, 2, 12), torch.randn(3, 12), torch.randn(8)
    angles, cache = torch.zeros(3, 2), torch.zeros(1, 1, 16, 12)
    args = {"k_cache": cache, "slots": torch.arange(3), "interleaved": True, "eps": 1e-6}
    cost = cost_of(
        "latent_rope_cache", q=q, latent=latent, weight=weight, cos=angles, sin=angles, **args
    )
    rotated = 2 * 3 * 2 * 4 * 4
    assert cost == OpCost(2 * latent.nbytes + weight.nbytes + 2 * angles.nbytes + rotated, 0, 0)


def test_a_norm_reads_and_writes_its_rows() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    assert cost_of("rms_norm", x=x, weight=weight, eps=1e-5) == OpCost(
        2 * x.nbytes + weight.nbytes, 0, 0
    )
    cost = cost_of("add_rms_norm", x=x, residual=x.clone(), weight=weight, eps=1e-5)
    assert cost.nbytes == 4 * x.nbytes + weight.nbytes


def test_the_whole_layers_count_as_their_parts() -> None:
    """Weights, keys and values of ``decode`` are those of the ops that it spans; what lies between
    is saved.
    """
    from modelmill.eval.op_trace import trace_ops
    from modelmill.nn.fusion import fuse_model
    from modelmill.nn.synthetic_step import synthetic_step

    model, ops = (
        decoder(window=24),
        registry.select_backends("cpu", dict.fromkeys(registry.op_names(), "torch")),
    )
    step = synthetic_step(model, ops, (3, 1, 40))
    with trace_ops(model, ops) as apart:
        model(_with(step, apart.ops))
    reference = registry.reference("decode")
    fused = fuse_model(model)
    with trace_ops(fused, ops.replace({"decode": reference})) as trace:
        fused(_with(step, trace.ops))
    parts = sum((each.cost for each in apart.calls), OpCost())
    (one,) = [each.cost for each in trace.calls if each.op == "decode"]
    assert one.unavoidable_bytes == parts.unavoidable_bytes
    assert one.operations == parts.operations
    assert 0 < one.nbytes < parts.nbytes


def _with(step: Any, ops: Any) -> Any:
    from dataclasses import replace

    return replace(step, ops=ops)


@pytest.mark.parametrize("op", registry.op_names())
def test_every_op_of_the_registry_can_be_counted(op: str) -> None:
    case = next(iter(bench_cases(op, "cpu", torch.float32)))
    assert cost_of(op, **case.args).nbytes > 0

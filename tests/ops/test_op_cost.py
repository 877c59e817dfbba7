"""What a call must move and compute, against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.eval.op_cases import bench_cases
from modelmill.ops import registry
from modelmill.ops.attention_cost import count_attended_keys_and_pairs
from modelmill.ops.fused_moe import RELU2
from modelmill.ops.int8_linear import quantize
from modelmill.ops.op_cost import OpCost
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata
from modelmill.ops.registry import count_cost
from modelmill.ops.routed_moe import RoutedMoEWeights
from tests.runtime.tiny import decoder


def cost_of(op: str, **args: Any) -> OpCost:
    called_with = registry.op_declarations()[op].pack_named_inputs(args)
    return count_cost(op, (), called_with, registry.reference(op)(**called_with))


def test_a_product_reads_its_weight_once() -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(128, 64), torch.randn(128)
    cost = cost_of("linear", x=x, weight=weight, bias=bias)
    assert cost == OpCost(
        4 * (3 * 64 + 128 * 64 + 128 + 3 * 128), 4 * (128 * 64 + 128), 2 * 3 * 64 * 128
    )
    assert (
        count_cost("linear", (x, weight), {}, torch.empty(3, 128)).unavoidable_bytes == 4 * 128 * 64
    )
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
    cost = count_cost("paged_attention", (), called_with, torch.empty(1, 8))
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


def test_a_mixture_reads_the_chosen_experts_alone() -> None:
    """Two tokens with two experts each, one in common: three of eight experts, four pairs."""
    x, ids = torch.randn(2, 64), torch.tensor([[1, 5], [5, 2]], dtype=torch.int32)
    routing = torch.full((2, 2), 0.5)
    gate_up, down = torch.randn(8, 2 * 48, 64), torch.randn(8, 64, 48)
    args = {"x": x, "topk_weights": routing, "topk_ids": ids, "gate_up": gate_up, "down": down}
    cost = cost_of("fused_moe", **args)
    expert_bytes = 4 * 3 * 48 * 64
    acts = 2 * x.nbytes + ids.nbytes + routing.nbytes
    assert cost == OpCost(3 * expert_bytes + acts, 3 * expert_bytes, 2 * 4 * 3 * 48 * 64)
    elsewhere = args | {"topk_ids": torch.tensor([[1, -1], [-1, -1]]), "global_num_experts": 16}
    assert cost_of("fused_moe", **elsewhere).unavoidable_bytes == expert_bytes
    ungated = args | {"gate_up": gate_up[:, :48].contiguous(), "activation": RELU2}
    assert cost_of("fused_moe", **ungated).operations == 2 * 4 * 2 * 48 * 64


def test_experts_with_scales_count_them_and_8_bit_activations_are_counted_apart() -> None:
    """One token and one of four experts: its codes and a float32 scale for each row."""
    scales = {"gate_up_scale": torch.ones(4, 96), "down_scale": torch.ones(4, 64)}
    args = {
        "x": torch.randn(1, 64), "topk_weights": torch.ones(1, 1),
        "topk_ids": torch.tensor([[3]], dtype=torch.int32),
        "gate_up": torch.ones(4, 96, 64, dtype=torch.int8),
        "down": torch.ones(4, 64, 48, dtype=torch.int8), **scales,
    }  # fmt: skip
    wide, narrow = cost_of("int8_fused_moe", **args), cost_of("w8a8_fused_moe", **args)
    assert wide.unavoidable_bytes == narrow.unavoidable_bytes == 3 * 48 * 64 + 4 * (96 + 64)
    assert (wide.int8_operations, narrow.int8_operations) == (0, 2 * 3 * 48 * 64)
    fp8 = {name: args[name].to(torch.float8_e4m3fn) for name in ("gate_up", "down")}
    assert cost_of("fp8_fused_moe", **args | fp8).fp8_operations == 2 * 3 * 48 * 64


def test_a_mixture_in_one_call_counts_its_router_and_experts() -> None:
    case = next(iter(bench_cases("routed_moe", "cpu", torch.float32)))
    moe, x = case.args["moe"], case.args["x"]
    assert isinstance(moe, RoutedMoEWeights)
    cost = cost_of("routed_moe", **case.args)
    experts, (count, hidden) = moe.experts, moe.router.shape
    pairs = len(x) * experts.topk_ids.shape[1]
    products = experts.gate_up.shape[1] + experts.inner_size
    assert cost.operations == 2 * len(x) * count * hidden + 2 * pairs * hidden * products
    stored = sum(t.nbytes for t in experts[3:] if isinstance(t, torch.Tensor))
    assert moe.router.nbytes < cost.unavoidable_bytes < moe.router.nbytes * 2 + stored


def test_a_router_behind_a_norm_reads_its_matrix() -> None:
    case = next(iter(bench_cases("add_rms_norm_router", "cpu", torch.float32)))
    cost, router = cost_of("add_rms_norm_router", **case.args), case.args["router"]
    assert cost.unavoidable_bytes >= router.nbytes
    assert cost.operations == 2 * len(case.args["x"]) * router.numel()


def test_a_recurrence_reads_and_writes_the_states_of_its_sequences() -> None:
    """Two sequences of 1 and 3 tokens and one without; a cache of 9 slots of 6 × 3 values."""
    rows = RecurrentStepMetadata(
        torch.tensor([0, 1, 4, 4], dtype=torch.int32), torch.tensor([7, 0, 1, 2]),
        torch.tensor([2, 0, 5]), torch.full((3,), 8), torch.full((3,), -1), 3, 64,
    )  # fmt: skip
    x, weight, state = torch.randn(4, 6), torch.randn(6, 4), torch.randn(9, 3, 6)
    cost = cost_of("causal_conv", x=x, state=state, weight=weight, bias=None, rows=rows)
    assert cost.unavoidable_bytes == 2 * 2 * 4 * 18
    assert cost.nbytes == cost.unavoidable_bytes + 2 * x.nbytes + weight.nbytes
    assert cost.operations == 2 * 4 * 18


def test_images_are_attended_window_by_window() -> None:
    """Windows of 4 × 4 on 6 × 5 tokens: two by two of them, each whole."""
    case = {
        "qkv": torch.randn(1, 6, 5, 3, 2, 8), "heads": 2, "window": 4,
        "fill": torch.zeros(3, 2, 8),
    }  # fmt: skip
    assert cost_of("image_attention", **case).operations == 4 * 4 * 2 * 8 * 16**2
    whole = cost_of("image_attention", **case | {"window": None})
    assert whole.operations == 4 * 2 * 8 * 30**2


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

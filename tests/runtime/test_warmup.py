"""Warming attention up: every form is called, nothing is read or stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelmill.core.errors import MissingDependency
from modelmill.ops import registry
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.w8a8_linear import Linear8BitInputs
from modelmill.runtime import warmup
from tests.runtime import tiny

SPECIALIZATIONS = [(1, 8), (2, 24), (5, 64)]


def test_every_form_is_called_with_empty_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_core = tiny.make_engine()
    runner = engine_core.model_runner
    requested: list[tuple[Any, ...]] = []

    def specialize(
        q: torch.Tensor, k: torch.Tensor, most: int, longest: int, window: int | None
    ) -> list[tuple[int, int]]:
        requested.append((tuple(q.shape[1:]), tuple(k.shape[1:]), most, longest, window))
        return SPECIALIZATIONS

    monkeypatch.setattr(registry, "warmup_size_functions", lambda op, chosen: [specialize])
    met: list[tuple[int, int, int]] = []

    def attend(inputs: PagedAttentionInputs) -> torch.Tensor:
        q, _, _, tables, starts, lengths, queries, context = inputs[:8]
        met.append((len(tables), context, queries))
        assert len(q) == len(tables) == len(lengths) == len(starts) - 1
        assert not lengths.any()
        assert starts.tolist() == list(range(len(q) + 1))
        return plain(inputs)

    plain = runner.ops.paged_attention
    recorder = warmup.AttentionRecorder(plain)
    runner.ops = runner.ops.replace({"paged_attention": recorder, "decode": None})
    runner.forward_all_ranks(runner.packer.dummy_batch(9, 3))
    before = [page.clone() for page in runner.kv.tensors]
    assert warmup.warm_up_decode_attention(
        runner.ops.replace({"paged_attention": attend}), recorder, 16, 128, 16
    ) == len(SPECIALIZATIONS)
    assert met == [(seqs, context, 1) for seqs, context in SPECIALIZATIONS]
    assert requested == [((4, 8), (2, 8, 8), 16, 128, None)]
    assert all(torch.equal(a, b) for a, b in zip(before, runner.kv.tensors))


def test_each_kind_of_layer_once() -> None:
    """Two layers with different windows are two kinds."""
    engine_core = tiny.make_engine(tiny.decoder(window=16))
    recorder = warmup.AttentionRecorder(engine_core.model_runner.ops.paged_attention)
    engine_core.model_runner.ops = engine_core.model_runner.ops.replace(
        {"paged_attention": recorder, "decode": None}
    )
    engine_core.model_runner.forward_all_ranks(engine_core.model_runner.packer.dummy_batch(9, 3))
    assert [call.window for call in recorder.calls.values()] == [16]


def test_without_forms_nothing_is_called() -> None:
    engine_core = tiny.make_engine()
    recorder = warmup.AttentionRecorder(engine_core.model_runner.ops.paged_attention)
    engine_core.model_runner.ops = engine_core.model_runner.ops.replace(
        {"paged_attention": recorder, "decode": None}
    )
    engine_core.model_runner.forward_all_ranks(engine_core.model_runner.packer.dummy_batch(9, 3))
    assert (
        warmup.warm_up_decode_attention(
            engine_core.model_runner.ops.replace({}, backends={"paged_attention": "torch"}),
            recorder,
            16,
            128,
            16,
        )
        == 0
    )


def test_products_are_called_once_a_form_and_kind_of_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of zeros, with as many scales as rows where each row has its own."""
    called: list[Linear8BitInputs] = []

    def multiply(inputs: Linear8BitInputs) -> torch.Tensor:
        called.append(inputs)
        return inputs.x.new_zeros(len(inputs.x), len(inputs.weight))

    def specialize(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
        assert most == 300
        return [len(weight), 300]

    monkeypatch.setattr(
        registry,
        "warmup_size_functions",
        lambda op, chosen: [specialize] if op == "w8a8_linear" else [],
    )
    plain = tiny.make_engine().model_runner.ops.replace(
        {
            "w8a8_linear": multiply,
            "linear_swiglu": None,
            "w8a8_linear_swiglu": None,
            "qkv_rope_cache": None,
        }
    )
    watched, recorders = warmup.wrap_with_gemm_recorders(plain)
    int_linears = {"int4_linear", "int8_linear", "int8_group_linear"}
    assert set(recorders) == {"w8a8_linear", "fp8_linear", *int_linears}
    x, scale, one = torch.ones(7, 4, dtype=torch.int8), torch.ones(5), torch.ones(1)
    for x_scale in (torch.ones(7), torch.ones(7)):
        watched.w8a8_linear(Linear8BitInputs(x, torch.ones(5, 4), scale, x_scale, torch.float32))
    watched.w8a8_linear(Linear8BitInputs(x, torch.ones(6, 4), scale, one, torch.float32, scale))
    assert len(called) == 3
    called.clear()
    assert warmup.warm_up_gemms(plain, recorders, 300) == 4
    shapes = {
        (tuple(each.x.shape), len(each.weight), len(each.x_scale))
        for each in called
        if each.x_scale is not None
    }
    assert shapes == {((5, 4), 5, 5), ((300, 4), 5, 300), ((6, 4), 6, 1), ((300, 4), 6, 1)}
    assert all(each.x.dtype is torch.int8 for each in called)


def test_a_projection_met_beforehand_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row arguments are extended with slot −1, so that the KV pages do not change."""
    functions = [lambda x, weight, max_tokens: [max_tokens]]
    monkeypatch.setattr(
        registry,
        "warmup_size_functions",
        lambda op, chosen: functions if op == "qkv_rope_cache" else [],
    )
    plain = tiny.make_engine().model_runner.ops.replace(
        {"qkv_rope_cache": registry.reference("qkv_rope_cache")}
    )
    watched, recorders = warmup.wrap_with_gemm_recorders(plain)
    pages = [torch.full((2, 1, 4, 8), 7.0) for _ in range(2)]
    x, weight, bias = torch.ones(3, 16), torch.ones(32, 16), torch.ones(32)
    angles, factors = torch.zeros(3, 4), torch.ones(3)
    inputs = RopeCacheInputs(*pages, torch.arange(3), 2, angles, angles, factors)
    watched.qkv_rope_cache(x, weight, bias, inputs)
    stored = [page.clone() for page in pages]
    assert not stored[1].eq(7.0).all()
    assert warmup.warm_up_gemms(plain, {"qkv_rope_cache": recorders["qkv_rope_cache"]}, 5) == 1
    assert all(torch.equal(page, was) for page, was in zip(pages, stored, strict=True))


def test_a_product_that_cannot_be_compiled_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(inputs: Linear8BitInputs) -> torch.Tensor:
        if len(inputs.x) > 9:
            raise MissingDependency("the CUDA kernel cannot be compiled:\nwhy")
        return inputs.x

    monkeypatch.setattr(
        registry, "warmup_size_functions", lambda op, chosen: [lambda x, weight, most: [most, 3]]
    )
    plain = tiny.make_engine().model_runner.ops.replace({"fp8_linear": fails})
    watched, recorders = warmup.wrap_with_gemm_recorders(plain)
    x, weight, scale = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    watched.fp8_linear(Linear8BitInputs(x, weight, scale, None, torch.float32))
    assert warmup.warm_up_gemms(plain, {"fp8_linear": recorders["fp8_linear"]}, 64) == 1
    assert "a GEMM kernel failed in warm-up: the CUDA kernel cannot be compiled" in caplog.text

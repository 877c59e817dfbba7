"""Watching a step changes nothing of what it computes, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelmill.eval.op_trace import make_label, module_name_pattern, parse_label, trace_ops
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops import registry
from tests.runtime.tiny import decoder


def test_every_call_is_seen_with_its_module() -> None:
    model = decoder()
    ops = registry.select_backends("cpu", dict.fromkeys(registry.op_names(), "torch"))
    step = synthetic_step(model, ops, (2, 1, 20))
    expected = model(step)
    labels: list[str] = []

    class Around:
        def __init__(self, label: str) -> None:
            labels.append(label)

        def __enter__(self) -> None: ...

        def __exit__(self, *rest: object) -> None: ...

    with trace_ops(model, ops, Around) as trace:
        logits = model(replace(step, ops=trace.ops))
    assert torch.equal(logits, expected)
    calls = [(each.module, each.op) for each in trace.calls]
    assert calls[:5] == [
        ("rotary", "rope_cos_sin"),
        ("layers.0.attn_norm", "rms_norm"),
        ("layers.0.attn.qkv_proj", "linear"),
        ("layers.0.attn.rope_cache", "rope_cache"),
        ("layers.0.attn.core", "paged_attention"),
    ]
    assert calls[-1] == ("head", "linear")
    assert len(calls) == 1 + 2 * 9 + 2
    assert {"modelmill|layers.1.mlp.act|silu_mul", "modelmill|embed|"} <= set(labels)
    modules = {each.module for each in trace.slices if not each.op}
    assert {"embed", "layers.1", "layers.1.attn.core", "head"} <= modules
    assert all(each.end >= each.start for each in trace.slices)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_go_where_a_step_fails() -> None:
    model = decoder()
    with pytest.raises(ZeroDivisionError), trace_ops(model, registry.select_backends("cpu")):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())


def test_labels_are_read_back() -> None:
    assert parse_label(make_label("layers.3.mlp", "linear")) == ("layers.3.mlp", "linear")
    assert parse_label("aten::mm") is None
    assert parse_label("a|b|c") is None


def test_layers_are_grouped() -> None:
    assert module_name_pattern("layers.17.attn.core") == "layers.*.attn.core"
    assert module_name_pattern("head") == "head"

"""Watching a step changes nothing of what it computes, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelmill.eval.watch import grouped, label_of, of_label, watching
from modelmill.nn.trial import trial_step
from modelmill.ops import shelf
from tests.runtime.tiny import decoder


def test_every_call_is_seen_with_its_module() -> None:
    model, ops = decoder(), shelf.resolve("cpu", dict.fromkeys(shelf.OPS, "torch"))
    step = trial_step(model, ops, (2, 1, 20))
    expected = model(step)
    labels: list[str] = []

    class Around:
        def __init__(self, label: str) -> None:
            labels.append(label)

        def __enter__(self) -> None: ...

        def __exit__(self, *rest: object) -> None: ...

    with watching(model, ops, Around) as seen:
        found = model(replace(step, ops=seen.ops))
    assert torch.equal(found, expected)
    calls = [(each.module, each.op) for each in seen.calls]
    assert calls[:5] == [
        ("rotary", "rotation"),
        ("layers.0.attn_norm", "rms_norm"),
        ("layers.0.attn.qkv_proj", "linear"),
        ("layers.0.attn.rotate", "rope_cache"),
        ("layers.0.attn.mix", "paged_attention"),
    ]
    assert calls[-1] == ("head", "linear")
    assert len(calls) == 1 + 2 * 9 + 2
    assert {"modelmill|layers.1.mlp.act|silu_mul", "modelmill|embed|"} <= set(labels)
    modules = {each.module for each in seen.slices if not each.op}
    assert {"embed", "layers.1", "layers.1.attn.mix", "head"} <= modules
    assert all(each.ended >= each.began for each in seen.slices)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_go_where_a_step_fails() -> None:
    model = decoder()
    with pytest.raises(ZeroDivisionError), watching(model, shelf.resolve("cpu")):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())


def test_labels_are_read_back() -> None:
    assert of_label(label_of("layers.3.mlp", "linear")) == ("layers.3.mlp", "linear")
    assert of_label("aten::mm") is None
    assert of_label("a|b|c") is None


def test_layers_are_grouped() -> None:
    assert grouped("layers.17.attn.mix") == "layers.*.attn.mix"
    assert grouped("head") == "head"

"""Modules watched at work: what is seen, what may be changed, and that nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelmill.nn.forward_hooks import attached_forward_hooks


class Boom(Exception):
    pass


def test_inputs_may_be_changed_and_outputs_are_seen() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    calls = []
    with attached_forward_hooks(
        model,
        lambda name, args: (args[0] - 3,) if name == "1" else None,
        lambda *call: calls.append(call),
    ):
        out = model(torch.tensor([1.0, 5.0]))
    assert out.tolist() == [0.0, 2.0]
    assert [name for name, _, _ in calls] == ["0", "1"], "the model itself has no name"
    assert calls[1][1][0].tolist() == [-2.0, 2.0]
    assert calls[1][2].tolist() == [0.0, 2.0]
    assert model(torch.tensor([1.0, 5.0])).tolist() == [1.0, 5.0]


def test_nothing_watches_after_an_error() -> None:
    model = nn.Sequential(nn.Identity())

    def burst(*_: object) -> None:
        raise Boom

    with pytest.raises(Boom), attached_forward_hooks(model, None, burst):
        model(torch.ones(1))
    assert model(torch.ones(1)).tolist() == [1.0]

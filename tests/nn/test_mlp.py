"""The gated block with and without the op that spans it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modelmill.nn.mlp import GatedMLP
from modelmill.ops import shelf
from modelmill.weights import held


def block(kind: str) -> GatedMLP:
    """48 channels, 80 inside, seeded."""
    mlp = GatedMLP(48, 80)
    generator = torch.Generator().manual_seed(0)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        weight = torch.randn(linear.shape, generator=generator) * linear.shape[1] ** -0.5
        linear.held = held.pack(kind, weight, torch.float32)
    return mlp


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_the_spanning_op_gives_the_same_and_is_left_out_where_modules_are_watched(kind: str) -> None:
    calls = []

    def gated(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return shelf.reference("gated_linear")(*args)

    ops = replace(shelf.resolve("cpu", {"linear": "torch", "silu_mul": "torch"}), gated_linear=gated)
    mlp, x = block(kind), torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []
    mlp.act.register_forward_hook(lambda *given: seen.append(given[2]))
    watched = mlp(x, SimpleNamespace(ops=ops, whole=False))
    assert len(seen) == 1
    assert not calls
    whole = mlp(x, SimpleNamespace(ops=ops, whole=True))
    assert len(calls) == (kind == "dense")
    torch.testing.assert_close(whole, watched)


def test_a_kernel_switched_by_hand_is_not_bypassed() -> None:
    assert shelf.resolve("cpu", {"silu_mul": "torch", "linear": "torch"}).gated_linear is None

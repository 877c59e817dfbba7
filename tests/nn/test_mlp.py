"""The gated block with and without the op that spans it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modelmill.nn.fusion import FusedGatedMLP
from modelmill.nn.mlp import GatedMLP
from modelmill.ops import registry
from modelmill.parallel.tp_group import SINGLE_RANK
from modelmill.weights import base


def block(weight_format: str) -> GatedMLP:
    """48 channels, 80 inside, seeded."""
    mlp = GatedMLP(48, 80)
    generator = torch.Generator().manual_seed(0)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        weight = torch.randn(linear.shape, generator=generator) * linear.shape[1] ** -0.5
        linear.weight = base.pack_as_format(weight_format, weight, torch.float32)
    return mlp


@pytest.mark.parametrize("weight_format", ["dense", "int8"])
def test_the_spanning_op_gives_the_same_and_is_left_out_where_modules_are_watched(
    weight_format: str,
) -> None:
    calls = []

    def linear_swiglu(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return registry.reference("linear_swiglu")(*args)

    plain_ops = registry.select_backends("cpu", {"linear": "torch", "silu_mul": "torch"})
    ops = plain_ops.replace({"linear_swiglu": linear_swiglu})
    mlp, x = block(weight_format), torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    hook_outputs: list[torch.Tensor] = []
    mlp.act.register_forward_hook(lambda *hook_args: hook_outputs.append(hook_args[2]))
    step = SimpleNamespace(ops=ops, tp_group=SINGLE_RANK)
    plain = mlp(x, step)
    assert len(hook_outputs) == 1
    assert not calls
    residual = torch.zeros(3, 48)
    branch = FusedGatedMLP(mlp)(x, residual, step)
    assert len(calls) == (weight_format == "dense")
    torch.testing.assert_close(residual if branch is None else branch, plain)


def test_a_kernel_switched_by_hand_is_not_bypassed() -> None:
    assert (
        registry.select_backends("cpu", {"silu_mul": "torch", "linear": "torch"}).linear_swiglu
        is None
    )

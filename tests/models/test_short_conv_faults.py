"""Faults of gated short convolutions (LFM2): refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.models import lfm2
from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.short_conv import ConvInputGate, ConvOutputGate
from tests.models.families.lfm2 import ConvWithSilu
from tests.models.family_cases import changed
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)
from tests.models.test_delta_net_faults import changed_state, swapped

FAMILY = "lfm2"
CHANGES = {"conv_bias": True}
LAYER, HIDDEN = "layers.0.attn", 48
CONV, STATE = "attn.conv", ("attn.conv.state",)
IN_PROJ = ("attn.B_proj", "attn.C_proj", "attn.x_proj")
B, C, X = (slice(HIDDEN * n, HIDDEN * (n + 1)) for n in range(3))


def tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], modules: str | tuple[str, ...] = CONV
) -> PlantedFault:
    return tensor_fault(f"{LAYER}.{name}", change, modules)


def rows(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Other rows of the projection to B, C and x, weights alone."""
    return tensor("in_proj.weight", change, IN_PROJ)


def input_gate(
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> PlantedFault:
    """Another gate in front of the convolution, of B, C and x."""

    def forward(self: Any, bcx: torch.Tensor, step: Any) -> torch.Tensor:
        del self, step
        return compute(*bcx.chunk(3, 1))

    return module_fault(ConvInputGate, forward, "attn.conv_input")


def output_gate(
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> PlantedFault:
    """Another gate behind the convolution, of its output and B, C and x."""

    def forward(self: Any, mixed: torch.Tensor, bcx: torch.Tensor, step: Any) -> torch.Tensor:
        del self, step
        return compute(mixed, *bcx.chunk(3, 1))

    return module_fault(ConvOutputGate, forward, "attn.conv_output")


def next_token(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    return real_conv(self, x.roll(-1, 0), step)


def without_own_token(weight: torch.Tensor) -> torch.Tensor:
    return weight * torch.tensor([1.0, 1.0, 0.0])


real_conv = CausalConv.forward
FAULTS: dict[str, PlantedFault] = {
    "state off by one token": (
        lambda: changed_state(CausalConv, lambda state: state.roll(1, 1)), STATE, 0,
    ),
    "state forgotten": (lambda: changed_state(CausalConv, torch.zeros_like), STATE, 0),
    "reads the next token": module_fault(CausalConv, next_token, CONV),
    "convolution shifted": tensor("conv.weight", lambda t: t.roll(1, 1)),
    "convolution reversed": tensor("conv.weight", lambda t: t.flip(1)),
    "the token itself left out": tensor("conv.weight", without_own_token),
    "convolution of other channels": tensor("conv.weight", lambda t: t.roll(1, 0)),
    "convolution's bias forgotten": tensor("conv.bias", torch.zeros_like),
    "SiLU behind the convolution": config_fault(
        lfm2, changed(recurrence=lambda spec: ConvWithSilu(**vars(spec))), CONV
    ),
    "B and C exchanged": rows(swapped(B, C)),
    "C and x exchanged": rows(swapped(C, X)),
    "x in front of B and C": rows(lambda t: t.roll(HIDDEN, 0)),
    "B, C and x in turns": rows(lambda t: t.unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)),
    "input not gated": input_gate(lambda b, c, x: x),
    "input gated by C": input_gate(lambda b, c, x: c * x),
    "input gate's sigmoid": input_gate(lambda b, c, x: b.sigmoid() * x),
    "output not gated": output_gate(lambda mixed, b, c, x: mixed),
    "output gated by B": output_gate(lambda mixed, b, c, x: b * mixed),
    "output gate's SiLU": output_gate(lambda mixed, b, c, x: F.silu(c) * mixed),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

"""Faults of gates of whole heads behind the attention: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.nn.attention import OutputGate
from tests.models.planted_fault import PlantedFault, module_fault, refusal_test, tensor_fault

FAMILY = "lfm3"
GATE, PROJECTION, LAYER = "attn.output_gate", "attn.gate_proj", 1


def gate(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Another gate; the change gets the heads [T, heads, D] and the gates [T, heads, 1]."""

    def forward(self: OutputGate, x: torch.Tensor, gates: torch.Tensor, step: Any) -> torch.Tensor:
        del self, step
        heads = x.unflatten(1, (gates.shape[1], -1)).float()
        return change(heads, gates.float()[..., None]).reshape(x.shape).to(x.dtype)

    return module_fault(OutputGate, forward, GATE, LAYER)


def tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    return tensor_fault(f"layers.{LAYER}.{PROJECTION}.weight", change, PROJECTION, LAYER)


FAULTS: dict[str, PlantedFault] = {
    "no gate": gate(lambda heads, gates: heads),
    "no sigmoid": gate(lambda heads, gates: heads * gates),
    "tanh for sigmoid": gate(lambda heads, gates: heads * gates.tanh()),
    "twice the sigmoid": gate(lambda heads, gates: heads * 2 * gates.sigmoid()),
    "SiLU of the gate": gate(lambda heads, gates: heads * torch.nn.functional.silu(gates)),
    "the next head's gate": gate(lambda heads, gates: heads * gates.roll(1, 1).sigmoid()),
    "one gate for all heads": gate(lambda heads, gates: heads * gates.mean(1, True).sigmoid()),
    "every n-th channel its head's": gate(
        lambda heads, gates: heads.flatten(1)
        * gates[..., 0].repeat(1, heads.shape[2]).sigmoid()
    ),
    "heads of the projection in another order": tensor(lambda t: t.roll(1, 0)),
    "one head's rows zero": tensor(lambda t: torch.cat((torch.zeros_like(t[:1]), t[1:]))),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

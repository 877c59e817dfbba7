"""Faults of Mamba2 that no config makes: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.mamba2 import GatedGroupNorm, StateSpaceScan
from modelmill.ops import causal_conv, ssd_scan
from tests.models.planted_fault import (
    PlantedFault,
    module_fault,
    reference_fault,
    refusal_test,
    tensor_fault,
)
from tests.models.test_delta_net_faults import changed_state, swapped

FAMILY = "mamba2"
LAYER = "layers.1.attn"
CONV, SSM, NORM = "attn.conv", "attn.ssm", "attn.gated_norm"


def changed_tokens(**changes: Callable[[Any], torch.Tensor]) -> Any:
    """Another preparation of the tokens for the scan."""
    real = ssd_scan._prepare_tokens

    def prepare(inputs: Any) -> Any:
        tokens = real(inputs)
        return tokens._replace(**{name: change(tokens) for name, change in changes.items()})

    return reference_fault(ssd_scan, "_prepare_tokens", prepare)


def norm_before_gate(self: Any, x: torch.Tensor, xbcz: torch.Tensor, step: Any) -> torch.Tensor:
    del step
    grouped = x.unflatten(1, (self.spec.groups, -1))
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.spec.eps)
    gate = torch.nn.functional.silu(xbcz[:, -x.shape[1] :].float())
    return (normed.flatten(1) * self.weight.float() * gate).to(xbcz.dtype)


def norm_over_all(self: Any, x: torch.Tensor, xbcz: torch.Tensor, step: Any) -> torch.Tensor:
    del step
    gated = x * torch.nn.functional.silu(xbcz[:, -x.shape[1] :].float())
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.spec.eps)
    return (gated * scale * self.weight.float()).to(xbcz.dtype)


def tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], modules: str | tuple[str, ...]
) -> PlantedFault:
    return tensor_fault(f"{LAYER}.{name}", change, modules, 1)


FAULTS: dict[str, PlantedFault] = {
    "inputs of the convolution off by one token": (
        lambda: changed_state(CausalConv, lambda state: state.roll(1, 1)), (f"{CONV}.state",), 0,
    ),
    "state decayed once more": (
        lambda: changed_state(StateSpaceScan, lambda state: state * 0.9), (f"{SSM}.state",), 0,
    ),
    "convolution shifted": tensor("conv.weight", lambda t: t.roll(1, 1), CONV),
    "convolution's bias forgotten": tensor("conv.bias", torch.zeros_like, CONV),
    "SiLU behind the convolution forgotten": (
        lambda: reference_fault(causal_conv, "_silu_to_dtype", lambda x, dtype: x.to(dtype)),
        (CONV,), 0,
    ),
    "decay's sign": (lambda: changed_tokens(log_decay=lambda t: -0.1 * t.log_decay), (SSM,), 0),
    "decay forgotten": (
        lambda: changed_tokens(log_decay=lambda t: torch.zeros_like(t.log_decay)), (SSM,), 0,
    ),
    "B without the step": (
        lambda: changed_tokens(delta=lambda t: torch.ones_like(t.delta)), (SSM,), 0,
    ),
    "B and C exchanged": (lambda: changed_tokens(b=lambda t: t.c, c=lambda t: t.b), (SSM,), 0),
    "A for A_log": tensor("ssm.A_log", torch.exp, SSM),
    "D forgotten": tensor("ssm.D", torch.zeros_like, SSM),
    "dt_bias forgotten": tensor("ssm.dt_bias", torch.zeros_like, SSM),
    "heads of D in another order": tensor("ssm.D", lambda t: t.flip(0), SSM),
    "steps of other heads": tensor("rates.weight", lambda t: t.roll(1, 0), "attn.rates"),
    "x and z exchanged": tensor(
        "in_proj.weight", swapped(slice(0, 96), slice(160, 256)), ("attn.x_proj", "attn.z_proj")
    ),
    "norm in front of the gate": module_fault(GatedGroupNorm, norm_before_gate, NORM),
    "norm over all groups": module_fault(GatedGroupNorm, norm_over_all, NORM),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

"""Faults of layers of one branch each (Nemotron-H): refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.models import nemotron_h
from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.mamba2 import GatedGroupNorm
from modelmill.nn.mlp import Relu2
from modelmill.nn.moe import CombineExperts
from modelmill.nn.rotary import RopeSpec
from tests.models.family_cases import ROTARY, changed, times
from tests.models.moe_faults import ROUTING, with_router
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)
from tests.models.test_delta_net_faults import changed_state, swapped
from tests.models.test_mamba2_faults import norm_before_gate
from tests.models.test_moe_faults import without_shared

FAMILY = "nemotron_h"
CHANGES = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
MAMBA, EXPERTS, ATTENTION, MLP = range(4)
SSM, CONV, NORM = "attn.ssm", "attn.conv", "attn.gated_norm"
MAMBA_IN = ("attn.x_proj", "attn.B_proj", "attn.C_proj", "attn.z_proj")


def config(modules: str | tuple[str, ...], layer: int, **changes: Any) -> PlantedFault:
    return config_fault(nemotron_h, changed(**changes), modules, layer)


def tensor(
    layer: int,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    modules: str | tuple[str, ...],
) -> PlantedFault:
    return tensor_fault(f"layers.{layer}.{name}", change, modules, layer)


FAULTS: dict[str, PlantedFault] = {
    "inputs of the convolution off by one token": (
        lambda: changed_state(CausalConv, lambda state: state.roll(1, 1)), (f"{CONV}.state",), MAMBA
    ),
    "steps limited": config(SSM, MAMBA, recurrence=changed(dt_limit=(0.0, 0.5))),
    "z behind x, B and C": tensor(
        MAMBA, "attn.in_proj.weight", swapped(slice(0, 96), slice(160, 256)), MAMBA_IN
    ),
    "norm in front of the gate": module_fault(GatedGroupNorm, norm_before_gate, NORM, MAMBA),
    "attention rotated": config(ROTARY, ATTENTION, rope=RopeSpec(12, 10000.0, 256)),
    "scores x 1.1": config("attn.core", ATTENTION, attention_scale=1.1 * 12**-0.5),
    "KV heads exchanged": tensor(
        ATTENTION, "attn.qkv_proj.weight", swapped(slice(48, 60), slice(60, 72)), "attn.k_proj"
    ),
    "ReLU for its square": config("mlp.act", MLP, activation="relu"),
    "ReLU for its square in experts": config(
        "mlp.experts.0.act", EXPERTS, moe=changed(expert=changed(activation="relu"))
    ),
    "square without ReLU": module_fault(
        Relu2, lambda self, x, step: x * x, ("mlp.experts.0.act",), EXPERTS
    ),
    "norm in front of the MLP of the layer before": tensor(
        MLP, "mlp_norm.weight", lambda t: t.roll(1), ("mlp_norm", "mlp_norm.eps")
    ),
    "eps x 10": config("attn_norm.eps", MAMBA, eps=times(10)),
    "not renormalized": config(ROUTING, EXPERTS, moe=with_router(renormalize=False)),
    "scale forgotten": config(ROUTING, EXPERTS, moe=with_router(scale=1.0)),
    "no groups": config(ROUTING, EXPERTS, moe=with_router(groups=1, top_groups=1)),
    "bias of other experts": tensor(
        EXPERTS, "mlp.routing.selection_bias", lambda t: t.roll(1), ROUTING
    ),
    "shared expert forgotten": module_fault(
        CombineExperts, without_shared, "mlp.combine", EXPERTS
    ),
    "an expert's second matrix x 1.05": tensor(
        EXPERTS, "mlp.experts.2.down_proj.weight", times(1.05), "mlp.experts.2.down_proj"
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

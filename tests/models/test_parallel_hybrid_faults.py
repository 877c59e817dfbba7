"""Faults of attention and Mamba2 side by side (Falcon-H1): refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.models import falcon_h1
from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.parallel_hybrid_layer import ParallelHybridLayer
from modelmill.nn.parallel_residual_layer import BranchSum
from tests.models.families.falcon_h1 import multiplied
from tests.models.family_cases import changed
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)
from tests.models.test_delta_net_faults import changed_state

FAMILY = "falcon_h1"
CHANGES = {"mamba_rms_norm": True}
LAYER = "layers.1.mamba"
WIDTH, SHARED = 96, 32  # of x and z, of B and C
QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
MAMBA_IN = ("mamba.x_proj", "mamba.B_proj", "mamba.C_proj", "mamba.z_proj")


def config(modules: str | tuple[str, ...], layer: int | None = 0, **changes: Any) -> PlantedFault:
    return config_fault(falcon_h1, changed(**changes), modules, layer)


def multipliers(modules: str | tuple[str, ...], **changes: Any) -> PlantedFault:
    """Other multipliers."""
    return config(modules, multipliers=multiplied(**changes))


def tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], modules: str | tuple[str, ...]
) -> PlantedFault:
    return tensor_fault(f"{LAYER}.{name}", change, modules, 1)


def branches(compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Another sum of the branches."""
    return module_fault(BranchSum, lambda self, one, other, step: compute(one, other), "sum")


def one_behind_the_other(self: Any, x: Any, residual: Any, rope: Any, step: Any) -> Any:
    """The recurrence reads what the attention returns."""
    x, residual = self.attn_norm(x, residual, step)
    mixed = self.attn(x, rope, step)
    x = self.sum(mixed, self.mamba(mixed, rope, step), step)
    x, residual = self.mlp_norm(x, residual, step)
    return self.mlp(x, step), residual


FAULTS: dict[str, PlantedFault] = {
    "attention forgotten": branches(lambda attention, mamba: mamba),
    "recurrence forgotten": branches(lambda attention, mamba: attention),
    "mean of the branches": branches(lambda attention, mamba: (attention + mamba) / 2),
    "recurrence behind the attention": module_fault(
        ParallelHybridLayer, one_behind_the_other, "mamba.in_proj.input"
    ),
    "input multiplier of attention forgotten": multipliers(QKV, attention_in=1.0),
    "output multiplier of attention forgotten": multipliers("attn.o_proj", attention_out=1.0),
    "key multiplier forgotten": multipliers("attn.k_proj", key=1.0),
    "input multiplier of the recurrence forgotten": multipliers(
        (*MAMBA_IN, "mamba.rates"), ssm_in=1.0
    ),
    "output multiplier of the recurrence forgotten": multipliers("mamba.out_proj", ssm_out=1.0),
    "multipliers in the order of rows": multipliers(
        (*MAMBA_IN, "mamba.rates"), ssm=(1.1, 0.8, 1.3, 0.9, 0.7)
    ),
    "multipliers of B and C exchanged": multipliers(
        ("mamba.B_proj", "mamba.C_proj"), ssm=(0.9, 1.1, 1.3, 0.8, 0.7)
    ),
    "multipliers of the MLP exchanged": multipliers("mlp.gate_proj", mlp=(0.7, 0.8)),
    "multiplier of embeddings forgotten": config("embed", None, embedding_scale=None),
    "multiplier of logits forgotten": config("head", None, logit_scale=None),
    "norm behind the gate": config(
        "mamba.gated_norm", parallel_recurrence=changed(norm_first=False)
    ),
    "inputs of the convolution off by one token": (
        lambda: changed_state(CausalConv, lambda state: state.roll(1, 1)),
        ("mamba.conv.state",), 0,
    ),
    "convolution shifted": tensor("conv.weight", lambda t: t.roll(1, 1), "mamba.conv"),
    "D of other heads": tensor("ssm.D", lambda t: t.flip(0), "mamba.ssm"),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

"""Faults of norms in front of the last products: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.models import bitnet
from modelmill.nn.sub_norm import SubNorm
from tests.models.family_cases import changed
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)

FAMILY = "bitnet"
ATTENTION, MLP = "attn.out_norm", "mlp.norm"
EITHER = (ATTENTION, MLP, f"{ATTENTION}.eps", f"{MLP}.eps")
LAYER = "layers.1"


def norm(change: Callable[[SubNorm, torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Another norm; the change gets the module and x."""

    def forward(self: SubNorm, x: torch.Tensor, step: Any) -> torch.Tensor:
        del step
        return change(self, x.float()).to(x.dtype)

    return module_fault(SubNorm, forward, EITHER)


def scaled(x: torch.Tensor, eps: float, size: int | None = None) -> torch.Tensor:
    """Without the weight; size: channels that are normed together."""
    groups = x.unflatten(1, (-1, size or x.shape[1]))
    return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(1)


def tensor(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    return tensor_fault(f"{LAYER}.{path}.weight", change, path, 1)


FAULTS: dict[str, PlantedFault] = {
    "no norm": norm(lambda self, x: x),
    "no weight": norm(lambda self, x: scaled(x, self.eps)),
    "less the mean": norm(
        lambda self, x: scaled(x - x.mean(-1, keepdim=True), self.eps) * self.weight.float()
    ),
    "heads by themselves": norm(lambda self, x: scaled(x, self.eps, 4) * self.weight.float()),
    "eps x 10": norm(lambda self, x: scaled(x, 10 * self.eps) * self.weight.float()),
    "no eps": norm(lambda self, x: scaled(x, 0.0) * self.weight.float()),
    "sum for mean": norm(lambda self, x: scaled(x, self.eps) * x.shape[1] ** -0.5),
    "weight less 1": norm(lambda self, x: scaled(x, self.eps) * (1 + self.weight.float())),
    "the largest for the root mean square": norm(
        lambda self, x: x / x.abs().amax(-1, keepdim=True) * self.weight.float()
    ),
    "half of the channels": norm(
        lambda self, x: x * torch.rsqrt(
            x[:, : x.shape[1] // 2].square().mean(-1, keepdim=True) + self.eps
        ) * self.weight.float()
    ),
    "attention's channels in another order": tensor(ATTENTION, lambda t: t.roll(1)),
    "the MLP's channels in another order": tensor(MLP, lambda t: t.flip(0)),
    "attention's weight x 1.05": tensor(ATTENTION, lambda t: 1.05 * t),
    "one half of the MLP's weight": tensor(
        MLP, lambda t: torch.cat((t[: len(t) // 2], torch.ones_like(t[len(t) // 2 :])))
    ),
    "eps of all norms": config_fault(bitnet, changed(eps=lambda eps: 10 * eps), ("attn_norm.eps",)),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

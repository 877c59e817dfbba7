"""Faults of xIELU: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.nn.xielu import XIELU
from tests.models.planted_fault import PlantedFault, module_fault, refusal_test, tensor_fault

FAMILY = "apertus"
ACT = "mlp.act"


def activation(
    positive: Callable[..., torch.Tensor] | None = None,
    negative: Callable[..., torch.Tensor] | None = None,
    linear: Callable[..., torch.Tensor] | None = None,
    *,
    bound: float = 0.0,
) -> PlantedFault:
    """Other branches; each gets the module and x."""

    def rises(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.alpha_p.float()) * x * x

    def falls(self: Any, x: torch.Tensor) -> torch.Tensor:
        alpha = self.beta.float() + F.softplus(self.alpha_n.float())
        return alpha * (torch.expm1(x.minimum(self.eps.float())) - x)

    def slope(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.beta.float() * x

    def forward(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        del step
        wide = x.float()
        above, below = (positive or rises)(self, wide), (negative or falls)(self, wide)
        return (torch.where(wide > bound, above, below) + (linear or slope)(self, wide)).to(x.dtype)

    return module_fault(XIELU, forward, ACT)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    return tensor_fault(f"layers.1.{ACT}.{name}", change, ACT, 1)


def alphas(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return self.alpha_p.float(), self.alpha_n.float()


def exponential(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (self.beta.float() + F.softplus(alphas(self)[1])) * torch.expm1(x.clamp(max=0))


FAULTS: dict[str, PlantedFault] = {
    "alpha_p as it is": activation(lambda self, x: alphas(self)[0] * x * x),
    "alpha_p's exponential": activation(lambda self, x: alphas(self)[0].exp() * x * x),
    "a cube": activation(lambda self, x: F.softplus(alphas(self)[0]) * x**3),
    "no square": activation(lambda self, x: F.softplus(alphas(self)[0]) * x),
    "alpha_n without beta": activation(
        negative=lambda self, x: F.softplus(alphas(self)[1]) * (torch.expm1(x.clamp(max=0)) - x)
    ),
    "alpha_n for alpha_p": activation(lambda self, x: F.softplus(alphas(self)[1]) * x * x),
    "no -x": activation(negative=exponential),
    "ReLU below 0": activation(negative=lambda self, x: torch.zeros_like(x)),
    "no linear part": activation(linear=lambda self, x: torch.zeros_like(x)),
    "a linear part of slope 1": activation(linear=lambda self, x: x),
    "bound at 1": activation(bound=1.0),
    "alpha_p x 1.05": tensor("alpha_p", lambda t: 1.05 * t),
    "alpha_n + 0.5": tensor("alpha_n", lambda t: t + 0.5),
    "beta x 1.2": tensor("beta", lambda t: 1.2 * t),
    "eps of -1": tensor("eps", lambda t: t - 1),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

"""xIELU, an activation with learned slopes (arXiv:2411.13010; Apertus)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.step import Step

XIELU_TENSORS = ("alpha_p", "alpha_n", "beta", "eps")


class XIELU(nn.Module):
    """α₊x² + βx above 0, α₋(exp(min(x, ε)) − 1 − x) + βx below.

    α₊ = softplus(``alpha_p``), α₋ = β + softplus(``alpha_n``); one number each for all channels.
    """

    NAME = "xielu"
    alpha_p: torch.Tensor
    alpha_n: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in zip(XIELU_TENSORS, ((1,), (1,), (), ()), strict=True):
            self.register_buffer(name, torch.empty(shape, device="meta"))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """Apply it to a tensor of any shape, in float32."""
        wide, beta = x.float(), self.beta.float()
        above = F.softplus(self.alpha_p.float()) * wide.square()
        below = (beta + F.softplus(self.alpha_n.float())) * (
            torch.expm1(wide.minimum(self.eps.float())) - wide
        )
        return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)

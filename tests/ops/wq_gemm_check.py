"""The check of a weight-only GEMM on a GPU against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelmill.ops import int8_group_linear
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int4_linear import int4_linear

LIMIT = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of the whole, in the norm


def check_wq_gemm(
    multiply: Callable[..., torch.Tensor],
    inputs: GroupwiseLinearInputs,
    bits: int,
    *,
    gated: bool,
    repeats: int = 1,
) -> None:
    """Check ``multiply(inputs, gated=gated)``, and that its bits are the same again.

    repeats: further calls.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        actual = multiply(inputs, gated=gated)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = (
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in inputs
    )
    op = int4_linear if bits == 4 else int8_group_linear.int8_group_linear
    truth = op(GroupwiseLinearInputs(*wide))
    if gated:
        gate, up = truth.to(inputs.x.dtype).double().chunk(2, 1)
        truth = gate / (1 + torch.exp(-gate)) * up
    assert not actual.isnan().any()
    error = float((actual.double() - truth).norm() / truth.norm())
    assert error < LIMIT[inputs.x.dtype] * (1.5 if gated else 1), inputs.x.shape
    for _ in range(repeats):
        assert torch.equal(multiply(inputs, gated=gated), actual), "bits change from call to call"

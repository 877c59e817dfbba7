"""Measures the factor between a quantized matrix's outputs and the exact ones on the same inputs.

Calibrated recipes fit scales to rounded codes by least squares. The codes carry errors of rounding,
and a regression on noisy values is attenuated: scales, and weights with them, come out smaller. By
rel_l2² where all inputs count alike, since the error is then orthogonal to what is stored; by more
where the inputs lie in a few directions, which leave the scales nearly free. A small factor of the
weights is then no fault, and only the outputs tell a scaled matrix from a rounded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modelmill.accept.error_metrics import INFINITE_ERROR
from modelmill.accept.reference.base import no_tf32


class QuantizedOutputGain(NamedTuple):
    """<ours, exact> / <exact, exact> of a matrix's outputs, and one standard deviation of it.

    It is infinite where nothing can be said: one row, one token, or outputs of 0.
    """

    gain: float = 1.0
    std: float = INFINITE_ERROR


def measure_quantized_output_gain(
    ours: Tensor, expected: Tensor, inputs: Sequence[Tensor]
) -> QuantizedOutputGain:
    """Measure the gain of the outputs of ``ours`` [N, K] beside those of ``expected``.

    Tokens count by their energy up to that of the median token: a first token with 500 times the
    others' outputs would decide alone, and so would, if all counted the same, a token whose output
    nearly cancels. Errors are shared by the tokens where inputs lie in one direction, and by the
    rows where these are multiples of each other, so that the larger of both deviations counts.

    inputs: batches of tokens [T, K].
    """
    rows, columns = expected.shape
    batches = [x for x in inputs if x.dim() == 2 and x.shape[1] == columns]
    tokens = sum(map(len, batches))
    if rows < 2 or tokens < 2:
        return QuantizedOutputGain()
    x = torch.cat(batches).to(expected.device, torch.float32)
    with no_tf32():
        exact, product = (
            (x @ weight.to(x.device, torch.float32).T).double() for weight in (expected, ours)
        )
    power = exact.square().sum(1, keepdim=True)
    counted = power.clamp(min=float(power.median()))
    energy, along = exact.square() / counted, exact * product / counted
    total = float(energy.sum())
    if not total > 0:
        return QuantizedOutputGain()
    gain = float(along.sum()) / total
    # without the common factor, which must not excuse itself
    rest = along - gain * energy
    stds = (
        float(rest.sum(1 - dim).norm()) / total * math.sqrt(count / (count - 1))
        for dim, count in enumerate((tokens, rows))
    )
    return QuantizedOutputGain(gain, max(stds))

"""The short causal convolution in front of recurrences, tap by tap."""

from __future__ import annotations

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder


def causal_convolution(r: LayerRecorder, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of x [T, C] with its weights [C, W] over the tokens before.

    Records "conv_state": the inputs that the next tokens read.
    """
    width = weight.shape[1]
    padded = torch.cat((x.new_zeros(width - 1, x.shape[1]), x))
    out = torch.stack([(padded[t : t + width] * weight.T).sum(0) for t in range(len(x))])
    r.record("conv_state", padded[len(x) :].reshape(1, -1), x)
    return out if bias is None else out + bias

"""The reference run over a whole sequence, layer by layer: what the contract does along the way of
the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelmill.accept.reference import LayerTrace, ReferenceModel


@torch.no_grad()
def reference_logits(
    reference: ReferenceModel,
    ids: Tensor | Sequence[int],
    *,
    prompt_length: int | None = None,
    on_layer: Callable[[int, LayerTrace], None] | None = None,
) -> Tensor:
    """[T, vocab] of a sequence whose first ``prompt_length`` tokens (None: all of it) were one
    prefill.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long)
    x = reference.embed(tokens)
    for index in range(reference.num_layers):
        length = len(tokens) if prompt_length is None else prompt_length
        trace = reference.run_layer(index, reference.layer_weights(index), x, length)
        if on_layer is not None:
            on_layer(index, trace)
        x = trace["output"].output
    return reference.head(x)["logits"].output

"""Which layers of a hybrid have a recurrence in the place of attention."""

from __future__ import annotations

from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote

# their names before transformers 5, and now
RECURRENT_TYPES = ("mamba", "linear_attention")
ATTENTION_TYPES = ("attention", "full_attention")


def recurrent_layers(
    types: Any,
    layers: int,
    recurrent: tuple[str, ...] = RECURRENT_TYPES,
    attention: tuple[str, ...] = ATTENTION_TYPES,
) -> frozenset[int]:
    """The layers with a recurrence, from the value of ``layer_types``.

    Args:
        types: The value.
        layers: How many there are.
        recurrent: The family's names of layers with a recurrence.
        attention: Those of layers with attention.

    Raises:
        CheckpointError: for other layer types, and for what is no list of so many layers.
    """
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(
            f"config.json: layer_types must be a list of num_hidden_layers={layers} layers, not "
            f"{quote(types, 60)}"
        )
    known = (*recurrent, *attention)
    unknown = next((each for each in types if each not in known), None)
    if unknown is not None:
        raise CheckpointError(
            f"config.json: layer_types names {quote(unknown, 60)}, which is not computed (known: "
            f"{', '.join(known)})"
        )
    return frozenset(layer for layer, each in enumerate(types) if each in recurrent)

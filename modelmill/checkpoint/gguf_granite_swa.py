"""GGUFs of Granite with windows: sinks in every layer, and layers that do not rotate."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import (
    SLIDING_WINDOW_KEY,
    ArchitectureKeys,
    read_layer_flags,
    read_window_layer_types,
)
from modelmill.checkpoint.gguf_families import (
    LLAMA_NAMES,
    GgufArchitecture,
    read_granite_multipliers,
    read_rms_config,
)

GRANITE_SWA_NAMES = {**LLAMA_NAMES, "blk.attn_sinks": "self_attn.sinks"}
ROPE_PATTERN_KEY = "attention.rope_pattern"


def _read_granite_swa_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Granite with windows; without a pattern of the rotation all layers rotate.

    So llama.cpp has it, whose converter makes the pattern from ``no_rope_layers``, not from
    ``layer_rope_theta``.
    """
    config = {**read_rms_config(keys), **read_granite_multipliers(keys)}
    layers = config["num_hidden_layers"]
    theta = config["rope_theta"]
    rotated = (
        read_layer_flags(keys, ROPE_PATTERN_KEY, layers)
        if ROPE_PATTERN_KEY in keys
        else [True] * layers
    )
    return {
        **config,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY),
        "layer_types": read_window_layer_types(keys, layers),
        "layer_rope_theta": [theta if each else 0 for each in rotated],
    }


GRANITE_SWA_ARCHITECTURES = {
    "granite_swa": GgufArchitecture(
        GRANITE_SWA_NAMES, has_permuted_qk=True, read_config=_read_granite_swa_config
    )
}

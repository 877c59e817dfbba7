"""The config of GGUFs of Granite with windows, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.gguf_mamba2 import HF_TO_GGUF_MULTIPLIER_KEYS
from modelmill.accept.reference.gguf_metadata import (
    add_rope_scaling,
    decoder_config,
    layer_types_from_window_pattern,
    make_metadata_reader,
)
from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

ARCHITECTURE = "granite_swa"


def granite_swa_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, ARCHITECTURE))
    layers, theta = config["num_hidden_layers"], config["rope_theta"]
    rotated = fact("attention.rope_pattern", [True] * layers)
    return config | {
        "mlp_bias": "blk.0.ffn_up.bias" in container.names(),
        "attention_multiplier": float(fact("attention.scale", config["head_dim"] ** -0.5)),
        **{name: float(fact(key, 1.0)) for name, key in HF_TO_GGUF_MULTIPLIER_KEYS.items()},
        "sliding_window": int(fact("attention.sliding_window")),
        "layer_types": layer_types_from_window_pattern(fact, layers),
        "layer_rope_theta": [theta if each else 0 for each in rotated],
    }


CONFIG_READERS_AND_SOURCES = {ARCHITECTURE: (granite_swa_config, GgufSource)}

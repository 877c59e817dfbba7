"""The config and the tensors of Mellum's GGUFs, as llama.cpp's converter writes them.

Layers with a window rotate without scaling.
"""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.gguf_metadata import (
    decoder_config,
    layer_types_from_window_pattern,
    make_metadata_reader,
    rope_scaling_options,
)
from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer


def mellum_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    fact = make_metadata_reader(container)
    config = decoder_config(container, "mellum")
    theta, layers = config.pop("rope_theta"), config["num_hidden_layers"]
    window = fact("attention.sliding_window")
    return config | {
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **rope_scaling_options(fact)},
            "sliding_attention": {"rope_theta": float(fact("rope.freq_base_swa", theta))},
        },
        "sliding_window": window,
        "layer_types": layer_types_from_window_pattern(fact, layers)
        if window
        else ["full_attention"] * layers,
        "num_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
        "norm_topk_prob": True,
    }


CONFIG_READERS_AND_SOURCES = {"mellum": (mellum_config, GgufSource)}

"""GGUFs of Apertus: the numbers of xIELU are metadata, one for each layer."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys, head_dim
from modelmill.checkpoint.gguf_families import LLAMA_NAMES, GgufArchitecture, read_rms_config

APERTUS_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_gate"},
    "blk.attn_norm": "attention_layernorm",
    "blk.ffn_norm": "feedforward_layernorm",
}
XIELU_PARAMETER_KEYS = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
    "xielu.eps": ("mlp.act_fn.eps", ()),
}


def _read_apertus_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Apertus; a rotation without scaling is named, since the family's default has one."""
    config = read_rms_config(keys)
    if config["rope_scaling"] is None:
        theta = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return {
        **config,
        "head_dim": head_dim(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


APERTUS_ARCHITECTURES = {
    "apertus": GgufArchitecture(
        APERTUS_NAMES, read_config=_read_apertus_config, numbers_by_layer=XIELU_PARAMETER_KEYS
    )
}

"""BitNet b1.58."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import GGUF_NAMES, Tensors, rename
from tests.models.family_cases import GgufCase, decoder_family, fault, rms_facts

NAMES = {
    **GGUF_NAMES, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm",
}  # fmt: skip


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    return {
        **rms_facts(raw), "rope.freq_base": 500000.0, "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0, "hidden_activation": "relu2",
    }  # fmt: skip


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """Under GGUF's names."""
    del raw
    return rename(tensors, NAMES)


CASE = decoder_family(
    "bitnet",
    {},
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "silu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 12},
        {"num_attention_heads": 10, "num_key_value_heads": None, "hidden_size": 60},
    ),
    {"attention_bias": 1, "head_dim": 16},
    {"ReLU": fault("mlp.act", activation="relu")},
    gguf=GgufCase(
        "bitnet", gguf_facts, tensors=as_converted, changes={"tie_word_embeddings": True}
    ),
)  # fmt: skip

"""Hunyuan, dense."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import ROPES, GgufCase, based, decoder_family, fault, rms_facts

ALPHA = {"type": "dynamic", "alpha": 8.0, "factor": 1.0}
DYNAMIC = {"type": "dynamic", "factor": 4.0}
# transformers needs a head_dim
BASE: dict[str, Any] = {"head_dim": 12, "rope_scaling": ALPHA}
HUNYUAN_ROPES = (
    *({"rope_scaling": None, **each} for each in ROPES),
    {"rope_scaling": None},
    {"rope_scaling": DYNAMIC, "max_position_embeddings": 24},
    {"rope_scaling": ALPHA | {"alpha": 3.0}, "rope_theta": 500.0},
    {"rope_scaling": ALPHA | {"alpha": 0, "factor": 4.0}, "max_position_embeddings": 24},
    {"rope_scaling": None, "rope_parameters": {"rope_type": "dynamic", "alpha": 3.0, "factor": 2.0,
                                               "rope_theta": 700.0}},
)  # fmt: skip
REFUSED = {"attention_bias": 1, "head_dim": 0, "rope_scaling": {"type": "linear", "alpha": 8.0}}
FAULTS = {
    "normed, then rotated": fault(("attn.rope_cache.q", "attn.rope_cache.k"), rotates_first=False),
    "RoPE base x 2": fault(
        ("attn.rotation.q_turned", "attn.rotation.k_turned"), 0,
        rope=based(2.0),
    ),
}  # fmt: skip


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF: the rotation's base has alpha in it."""
    dim, alpha = raw["head_dim"], raw["rope_scaling"]["alpha"]
    return {
        **rms_facts(raw),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": 10000.0 * alpha ** (dim / (dim - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256,
    }


CASE = decoder_family(
    "hunyuan_v1_dense",
    BASE,
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    REFUSED,
    FAULTS,
    ropes=HUNYUAN_ROPES,
    unnamed_fields=frozenset({"eod_token_id"}),
    gguf=GgufCase("hunyuan-dense", gguf_facts, changes={"head_dim": 16}),
)  # fmt: skip

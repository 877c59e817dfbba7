"""MPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.family_cases import (
    ALIBI_FAULTS,
    VOCAB,
    FamilyCase,
    GgufCase,
    Logits,
    fault,
    save_transformers,
    times,
)


def save(raw: dict[str, Any], folder: Path) -> Logits:
    """transformers, with the largest exponent of the slopes that the config names.

    transformers does not pass it on.
    """
    logits = save_transformers(raw, folder)
    largest = raw["attn_config"].get("alibi_bias_max", 8)
    if largest == 8:
        return logits
    from transformers.models.mpt import modeling_mpt

    build = modeling_mpt.build_mpt_alibi_tensor

    def patched(ids: list[int], decode_from: int | None = None) -> Any:
        modeling_mpt.build_mpt_alibi_tensor = lambda heads, length, _, device: build(
            heads, length, largest, device
        )
        try:
            return logits(ids, decode_from)
        finally:
            modeling_mpt.build_mpt_alibi_tensor = build

    return patched


def attention(**changes: Any) -> dict[str, Any]:
    return {"attn_config": {"model_type": "", "clip_qkv": 1.5, "alibi": True, **changes}}


CASE = FamilyCase(
    "mpt",
    {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 256,
     **attention()},
    (
        {"vocab_size": 96}, {"d_model": 64, "n_heads": 4}, {"n_layers": 3}, {"n_heads": 3},
        {"max_seq_len": 128}, {"tie_word_embeddings": False}, {"layer_norm_epsilon": 1e-3},
        attention(clip_qkv=None), attention(alibi_bias_max=16), attention(softmax_scale=0.5),
        attention(attn_impl="triton", attn_pdrop=1), {"resid_pdrop": 0.5, "emb_pdrop": 0.5},
        {"learned_pos_emb": False, "init_device": "meta", "embedding_fraction": 0.5},
        {"norm_type": "layernorm"},
        {"d_model": None, "n_layers": None, "n_heads": None, "hidden_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    {"is_encoder_decoder": True, "expansion_ratio": 2, "no_bias": False, "logit_scale": 0.5,
     "norm_type": "rmsnorm", "attn_config": {"alibi": False}, "n_heads": 5, "d_model": 0},
    {
        **ALIBI_FAULTS,
        "eps x 10": fault("attn_norm.eps", eps=times(10)),
        "no clip": fault("attn.core", qkv_clip=None),
        "clip x 1.5": fault("attn.qkv_clip.q_clipped", qkv_clip=times(1.5)),
        "another activation": fault("mlp.act", activation="relu"),
    },
    make=save,
    gguf=GgufCase(
        "mpt",
        lambda raw: {
            "context_length": raw["max_seq_len"], "feed_forward_length": 4 * raw["hidden_size"],
            "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 1.5,
            "attention.max_alibi_bias": 16.0,
        },
        changes={"d_model": None, "n_layers": None, "n_heads": None, "hidden_size": 48,
                 "num_hidden_layers": 2, "num_attention_heads": 6,
                 **attention(alibi_bias_max=16)},
    ),
)  # fmt: skip

"""Falcon 7B, 40B, 180B, Falcon 2 and Falcon-RW."""

from __future__ import annotations

from modelmill.nn.alibi import AlibiConfig
from tests.models.family_cases import (
    LLAMA_FAULTS,
    ROPES,
    VOCAB,
    FamilyCase,
    GgufCase,
    ReversedSlopes,
    fault,
)

# Falcon-RW; with these head counts transformers' bfloat16 holds the slopes exactly
ALIBI = {"alibi": True, "new_decoder_architecture": False, "multi_query": False,
         "parallel_attn": False, "bias": True, "num_kv_heads": None}  # fmt: skip
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}

CASE = FamilyCase(
    "falcon",
    {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
     "ffn_hidden_size": 80, "max_position_embeddings": 256, "alibi": False, **NEW},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3}, {"ffn_hidden_size": 72},
        {"ffn_hidden_size": None}, {"max_position_embeddings": 128}, *ROPES,
        {"num_kv_heads": None}, {"num_kv_heads": 1}, {"num_ln_in_parallel_attn": 1},
        {"new_decoder_architecture": False}, {"new_decoder_architecture": False, "bias": True},
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None},
        {"new_decoder_architecture": False, "parallel_attn": False},
        {"bias": True}, {"activation": "relu"}, {"layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False}, {"hidden_dropout": 0.5},
        ALIBI, ALIBI | {"num_attention_heads": 8}, {"alibi": True},
    ),
    {"is_encoder_decoder": True, "activation": "quick_gelu", "alibi": 1,
     "num_ln_in_parallel_attn": 3, "parallel_attn": False, "multi_query": 1, "bias": "x"},
    {
        **LLAMA_FAULTS,
        "another activation": fault("mlp.act", activation="relu"),
        "no ALiBi": fault("attn.core", case=ALIBI, alibi=None),
        "slopes in the other order": fault(
            "attn.core", case=ALIBI, alibi=ReversedSlopes(scale=12**-0.5)
        ),
        "ALiBi that is not scaled": fault("attn.core", case=ALIBI, alibi=AlibiConfig()),
    },
    attention="sdpa",  # eager adds ALiBi twice
    gguf=GgufCase(
        "falcon",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": raw["ffn_hidden_size"],
        },
        grouped=True,
    ),
)  # fmt: skip

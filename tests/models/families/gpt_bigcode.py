"""StarCoder 1 and SantaCoder."""

from __future__ import annotations

from tests.models.family_cases import EPS_FAULT, VOCAB, FamilyCase, GgufCase, fault

CASE = FamilyCase(
    "gpt_bigcode",
    {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128,
     "n_inner": 80},
    (
        {"vocab_size": 96}, {"n_embd": 64}, {"n_layer": 3}, {"n_head": 2}, {"n_positions": 72},
        {"n_inner": None}, {"activation_function": "relu"}, {"multi_query": False},
        {"layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": False},
        {"attention_softmax_in_fp32": False, "scale_attention_softmax_in_fp32": False},
    ),
    {"is_encoder_decoder": True, "activation_function": "quick_gelu", "n_inner": -3,
     "layer_norm_epsilon": "x", "multi_query": 1, "scale_attn_weights": False,
     "add_cross_attention": True},
    {
        "eps x 10": EPS_FAULT,
        "another activation": fault("mlp.act", activation="relu"),
    },
    gguf=GgufCase(
        "starcoder",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": 1,
            "rope.freq_base": None,
        },
    ),
)  # fmt: skip

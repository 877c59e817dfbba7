"""GPT-J."""

from __future__ import annotations

from tests.models.family_cases import LLAMA_FAULTS, QK, VOCAB, FamilyCase, fault, with_dim

CASE = FamilyCase(
    "gptj",
    {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128,
     "rotary_dim": 8, "n_inner": 80},
    (
        {"vocab_size": 96}, {"n_embd": 64}, {"n_layer": 3}, {"n_head": 2}, {"n_positions": 72},
        {"rotary_dim": 4}, {"rotary_dim": 12}, {"n_inner": None}, {"activation_function": "relu"},
        {"layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": True},
    ),
    {"is_encoder_decoder": True, "activation_function": "quick_gelu", "rotary_dim": 16,
     "n_inner": -3, "layer_norm_epsilon": "x", "n_head": 16},
    {
        **LLAMA_FAULTS,
        "half the rotated channels": fault(QK, rope=with_dim(4)),
        "another activation": fault("mlp.act", activation="relu"),
    },
)  # fmt: skip

"""BLOOM."""

from __future__ import annotations

from tests.models.family_cases import ALIBI_FAULTS, VOCAB, FamilyCase, GgufCase, fault

CASE = FamilyCase(
    "bloom",
    {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": 256},
    (
        {"vocab_size": 96}, {"hidden_size": 64, "n_head": 4}, {"n_layer": 3}, {"n_head": 3},
        {"layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": False}, {"slow_but_exact": True},
        {"seq_length": 128}, {"n_embed": 36, "hidden_size": 36}, {"hidden_dropout": 0.5},
        {"n_head": None, "n_layer": None, "num_attention_heads": 4, "num_hidden_layers": 2},
    ),
    {"is_encoder_decoder": True, "apply_residual_connection_post_layernorm": True, "n_head": 5,
     "hidden_size": 0, "layer_norm_epsilon": "x", "seq_length": 0, "tie_word_embeddings": 1},
    {
        **ALIBI_FAULTS,
        "another activation": fault("mlp.act", activation="relu"),
    },
    gguf=GgufCase(
        "bloom",
        lambda raw: {
            "context_length": raw["seq_length"], "feed_forward_length": 4 * raw["hidden_size"],
            "attention.layer_norm_epsilon": 1e-5,
        },
        grouped=True,
        changes={"n_head": None, "n_layer": None, "num_attention_heads": 6,
                 "num_hidden_layers": 2},
    ),
)  # fmt: skip

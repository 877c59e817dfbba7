"""GPT-Neo."""

from __future__ import annotations

from tests.models.family_cases import EPS_FAULT, VOCAB, FamilyCase, fault

CASE = FamilyCase(
    "gpt_neo",
    {"vocab_size": VOCAB, "hidden_size": 48, "num_layers": 2, "num_heads": 4,
     "intermediate_size": 80, "max_position_embeddings": 128, "window_size": 20,
     "attention_types": [[["global", "local"], 1]]},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_heads": 2},
        {"num_layers": 3, "attention_types": [[["local"], 2], [["global"], 1]]},
        {"max_position_embeddings": 72}, {"intermediate_size": None}, {"window_size": 5},
        {"activation_function": "relu"}, {"layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False}, {"attention_layers": ["global", "local"]},
        {"embed_dropout": 0.3, "resid_dropout": 0.3, "classifier_dropout": 0.3},
    ),
    {"is_encoder_decoder": True, "activation_function": "quick_gelu", "intermediate_size": -3,
     "layer_norm_epsilon": "x", "window_size": 0, "attention_types": [[["global"], 3]],
     "attention_layers": ["local", "global"], "num_heads": 5},
    {
        "eps x 10": EPS_FAULT,
        "another activation": fault("mlp.act", activation="relu"),
        "scores with a factor": fault("attn.core", attention_scale=None),
        "a window in no layer": fault("attn.core", 1, windows=(None, None)),
        "a longer window": fault("attn.core", 1, windows=(None, 21)),
    },
    split_tolerance=2e-4,
)  # fmt: skip

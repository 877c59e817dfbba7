"""GPT-NeoX and Pythia."""

from __future__ import annotations

from tests.models.family_cases import (
    LLAMA_FAULTS,
    QK,
    REFUSED,
    VOCAB,
    FamilyCase,
    GgufCase,
    fault,
    with_dim,
)

CASE = FamilyCase(
    "gpt_neox",
    {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "intermediate_size": 80, "max_position_embeddings": 256},
    (
        {"vocab_size": 96}, {"hidden_size": 96}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"num_attention_heads": 2}, {"max_position_embeddings": 128},
        {"rotary_emb_base": 300.0}, {"rotary_pct": 0.5}, {"rotary_pct": 1.0},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                             "partial_rotary_factor": 0.5}},
        {"use_parallel_residual": False}, {"attention_bias": False}, {"hidden_act": "gelu_new"},
        {"layer_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"hidden_dropout": 0.5},
        {"classifier_dropout": 0.5, "is_decoder": True},
    ),
    {**REFUSED, "rotary_pct": 0.05, "use_parallel_residual": "x", "attention_bias": 1},
    {
        **LLAMA_FAULTS,
        "half the rotated channels": fault(QK, rope=with_dim(2)),
    },
    gguf=GgufCase(
        "gptneox",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True,
            "rope.dimension_count": raw["hidden_size"] // raw["num_attention_heads"] // 4,
        },
        grouped=True,
    ),
)  # fmt: skip

"""OPT."""

from __future__ import annotations

from tests.models.family_cases import VOCAB, FamilyCase, fault, plus, times

CASE = FamilyCase(
    "opt",
    {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
     "ffn_dim": 80, "max_position_embeddings": 128},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3}, {"ffn_dim": 72},
        {"num_attention_heads": 2}, {"max_position_embeddings": 72}, {"enable_bias": False},
        {"activation_function": "gelu"}, {"activation_function": "gelu_new"},
        {"tie_word_embeddings": False}, {"word_embed_proj_dim": 48}, {"layerdrop": 0.3},
        {"dropout": 0.3, "init_std": 0.5},
        {"layer_norm_elementwise_affine": False, "enable_bias": False, "scale_embeddings": False},
    ),
    {"is_encoder_decoder": True, "activation_function": "quick_gelu",
     "do_layer_norm_before": False, "_remove_final_layer_norm": True, "word_embed_proj_dim": 24,
     "layer_norm_elementwise_affine": 1, "scale_embeddings": True, "enable_bias": 1, "ffn_dim": 0},
    {
        "positions from row 0": fault("embed", None, first_position_row=0, max_len=plus(2)),
        "positions from row 1": fault("embed", None, first_position_row=1, max_len=plus(1)),
        "eps x 10": fault("attn_norm.eps", eps=times(10)),
        "another activation": fault("mlp.act", activation="silu"),
    },
)  # fmt: skip

"""Fields of configuration classes that change no logits."""

from __future__ import annotations

from typing import Any

# fields that change no logits, each at another value than its own; all at once
IDLE: dict[str, Any] = {
    "transformers_version": "4.0.0", "architectures": ["SomethingElse"],
    "output_hidden_states": True,
    "return_dict": False, "dtype": "float32", "chunk_size_feed_forward": 4,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2}, "problem_type": "regression", "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 4, "eos_token_id": 5, "initializer_range": 0.5, "attention_dropout": 0.5,
    "pretraining_tp": 2,
    "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "summary_type": "last",
    "summary_use_proj": False,
    "summary_activation": "tanh", "summary_proj_to_labels": False, "summary_first_dropout": 0.5,
    "reorder_and_upcast_attn": True, "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.5,
    "output_router_logits": True,
}  # fmt: skip

"""The metadata that most GGUF architectures have, under Hugging Face's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelmill.accept.reference.tensor_source import RawContainer


def make_metadata_reader(container: RawContainer) -> Callable[..., Any]:
    """Return what reads the architecture's own metadata, by key and default."""
    facts = container.metadata
    architecture = facts["general.architecture"]

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{architecture}.{key}", default)

    return fact


def decoder_config(container: RawContainer, model_type: str) -> dict[str, Any]:
    """Return the config of a decoder; whole heads are rotated."""
    fact, names = make_metadata_reader(container), container.names()
    width, heads = int(fact("embedding_length")), int(fact("attention.head_count"))
    eps = fact("attention.layer_norm_rms_epsilon", fact("attention.layer_norm_epsilon", 1e-5))
    blocks = int(fact("block_count")) - int(fact("nextn_predict_layers", 0))
    return {
        "model_type": model_type,
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": int(fact("attention.key_length", width // heads)),
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": float(eps),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }


def rope_scaling_options(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return a scaled rotation, linear where no type is named; empty without scaling."""
    kind, factor = str(fact("rope.scaling.type", "linear")), fact("rope.scaling.factor")
    if kind == "none" or not factor or (kind == "linear" and factor == 1):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    trained = fact("rope.scaling.original_context_length")
    if trained:  # 0 is none
        scaling["original_max_position_embeddings"] = int(trained)
    for name in ("beta_fast", "beta_slow"):
        value = fact(f"rope.scaling.yarn_{name}")
        if value:
            scaling[name] = float(value)
    return scaling


def add_rope_scaling(container: RawContainer, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the scaling of its rotation, where there is one."""
    scaling = rope_scaling_options(make_metadata_reader(container))
    return config | ({"rope_scaling": scaling} if scaling else {})


def layer_types_from_window_pattern(fact: Callable[..., Any], layers: int) -> list[str]:
    """Return which layers have a window: from a list, or all but every n-th, unnamed the fourth."""
    pattern = fact("attention.sliding_window_pattern", 4)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in pattern]


def grouped_router_config(fact: Callable[..., Any], *, normalized: bool) -> dict[str, Any]:
    """Return a router of DeepSeek-V3's kind; normalized: whether weights sum to 1 without a key."""
    return {
        "n_routed_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
        "first_k_dense_replace": int(fact("leading_dense_block_count", 0)),
        "routed_scaling_factor": float(fact("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(fact("expert_weights_norm", normalized)),
        "n_group": int(fact("expert_group_count", 1)),
        "topk_group": int(fact("expert_group_used_count", 1)),
    }

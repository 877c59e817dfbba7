"""Reads the metadata of GGUF containers raw: a config in Hugging Face keys, rotary frequencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelmill.accept.reference.gguf_metadata import (
    grouped_router_config,
    layer_types_from_window_pattern,
    make_metadata_reader,
    rope_scaling_options,
)
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import RawContainer
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

DIRECTLY_READ_ARCHITECTURES = (
    "gpt2",
    "llama",
    "qwen",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
)
MOE_MODEL_TYPES_BY_ARCHITECTURE = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
}
# GGUF's architecture → the family
MODEL_TYPES_BY_ARCHITECTURE = {
    "bloom": "bloom",
    "mpt": "mpt",
    "baichuan": "llama",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v2",
    "bitnet": "bitnet",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "minicpm": "minicpm",
    "smollm3": "smollm3",
    "xverse": "xverse",
    "internlm2": "llama",
    "starcoder2": "starcoder2",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "glm4": "glm4",
    "phi2": "phi",
    "stablelm": "stablelm",
    "exaone4": "exaone4",
    "chatglm": "chatglm",
    "gptneox": "gpt_neox",
    "falcon": "falcon",
    "gpt-oss": "gpt_oss",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
# architectures whose scaled positions have a rule of their own, and the scaling
ROPE_SCALING_TYPE_BY_ARCHITECTURE = {"gemma3": "linear", "gpt-oss": "yarn", "deepseek2": "yarn"}
GROUPED_ROUTER_ARCHITECTURES = ("glm4moe", "deepseek2")  # routers of DeepSeek-V3's kind
# depth of the 27B models, whose scores are divided by the root of width / heads
GEMMA_27B_NUM_LAYERS = {"gemma2": 46, "gemma3": 62}
BAICHUAN_13B_NUM_LAYERS = 40  # layers of the models with ALiBi


def _make_required_metadata_reader(
    facts: Mapping[str, Any], architecture: str
) -> Callable[..., Any]:
    """Return what reads an architecture's own metadata, by key and default."""

    def fact(key: str, default: Any = None) -> Any:
        value = facts.get(f"{architecture}.{key}", default)
        if value is None:
            raise CorruptCheckpoint(
                f"GGUF metadata lacks {architecture}.{key}; convert the model again"
            )
        return value

    return fact


def config_from_gguf(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys from GGUF metadata, as far as the reference reads it."""
    facts = container.metadata
    architecture = str(facts.get("general.architecture"))
    if architecture in MODEL_TYPES_BY_ARCHITECTURE:
        return mapped_architecture_config(container, architecture)
    if architecture not in DIRECTLY_READ_ARCHITECTURES:
        raise UnknownArchitecture(
            f"GGUF architecture {architecture!r} has no reference; "
            f"known are {', '.join(DIRECTLY_READ_ARCHITECTURES)}"
        )

    fact = _make_required_metadata_reader(facts, architecture)
    heads = int(fact("attention.head_count"))
    width = int(fact("embedding_length"))
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": width,
        "num_hidden_layers": int(fact("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": int(fact("attention.key_length", width // heads)),
        "max_position_embeddings": int(fact("context_length")),
        "tie_word_embeddings": "output.weight" not in container.names(),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "attention_bias": None,
        "mlp_bias": None,
        "is_causal": bool(facts.get(f"{architecture}.attention.causal", True)),
    }
    if architecture == "gpt2":
        return config | {"layer_norm_epsilon": float(fact("attention.layer_norm_epsilon"))}
    eps = float(fact("attention.layer_norm_rms_epsilon"))
    if architecture == "qwen":
        # The container has no keys for dynamic NTK and logn: they are off, as in every GGUF
        # runtime.
        return config | {
            "layer_norm_epsilon": eps,
            "rotary_emb_base": config["rope_theta"],
            "kv_channels": config["head_dim"],
        }
    # A window in the file is ignored for these three, as in every GGUF runtime: full attention.
    config |= {"rms_norm_eps": eps}
    experts = int(facts.get(f"{architecture}.expert_count", 0))
    if not experts:
        return config
    return config | moe_config_entries(architecture, experts, int(fact("expert_used_count")))


def moe_config_entries(architecture: str, experts: int, top_k: int) -> dict[str, Any]:
    """Return what a model with experts has in its config besides."""
    model_type = MOE_MODEL_TYPES_BY_ARCHITECTURE.get(architecture, "mixtral")
    return {
        "model_type": model_type,
        "architecture": architecture,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        # not in the file: it belongs to the architecture
        "norm_topk_prob": model_type == "qwen3_moe",
        "rope_scaling": None,
    }


def mapped_architecture_config(container: RawContainer, architecture: str) -> dict[str, Any]:
    """Return the config of one of MODEL_TYPES_BY_ARCHITECTURE.

    It has the keys of all of them; a family reads its own. Factors are stored as llama.cpp
    multiplies them.
    """
    facts, names = container.metadata, container.names()

    fact = _make_required_metadata_reader(facts, architecture)
    scaling = rope_scaling_options(make_metadata_reader(container))
    fixed = ROPE_SCALING_TYPE_BY_ARCHITECTURE.get(architecture)
    known = ("linear", "yarn") if fixed is None else (fixed,)
    if "rope_freqs.weight" in names or (scaling and scaling["rope_type"] not in known):
        raise UnknownArchitecture(f"scaled positions of {architecture} are not known here")
    heads, width, layers = (
        int(fact(key)) for key in ("attention.head_count", "embedding_length", "block_count")
    )
    dim = int(fact("attention.key_length", width // heads))
    rms = f"{architecture}.attention.layer_norm_rms_epsilon" in facts
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": dim,
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "max_position_embeddings": int(fact("context_length")),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "partial_rotary_factor": int(fact("rope.dimension_count", dim)) / dim,
        "rms_norm_eps": float(fact(f"attention.layer_norm_{'rms_' if rms else ''}epsilon")),
        "ffn_hidden_size": int(fact("feed_forward_length", 0)),
    }
    experts = int(fact("expert_count", 0))
    window = facts.get(f"{architecture}.attention.sliding_window")
    return {
        "model_type": MODEL_TYPES_BY_ARCHITECTURE[architecture],
        **sizes,
        **_alias_size_keys(sizes),
        **_multiplier_config(fact, sizes),
        **_flags_from_tensor_names(names),
        "is_causal": bool(fact("attention.causal", True)),
        "use_parallel_residual": bool(fact("use_parallel_residual", True)),
        **({} if window is None else {"sliding_window": int(window)}),
        **({"rope_scaling": scaling} if scaling and fixed is None else {}),
        "layer_types": layer_types_from_window_pattern(fact, layers)
        if architecture == "exaone4"
        else None,
        **(_gemma_config(facts, architecture, sizes) if "gemma" in architecture else {}),
        **(_granitemoe_config(facts, fact) if architecture == "granitemoe" else {}),
        **(_baichuan_config(layers) if architecture == "baichuan" else {}),
        **(_gpt_oss_config(fact) if architecture == "gpt-oss" else {}),
        **({"model_type": "glm"} if _is_transformers_glm(architecture, names) else {}),
        **(_mpt_config(fact) if architecture == "mpt" else {}),
        **({"hidden_act": fact("hidden_activation", "silu")} if architecture == "bitnet" else {}),
        **(
            _grouped_experts_config(fact, names)
            if architecture in GROUPED_ROUTER_ARCHITECTURES and experts
            else {}
        ),
        **(_deepseek_config(facts, fact) if architecture == "deepseek2" else {}),
    }


def _expert_count_config(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return the numbers of experts."""
    return {
        "num_local_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
    }


def _is_transformers_glm(architecture: str, names: list[str]) -> bool:
    """Return whether q, k and v are apart, as in the class of transformers."""
    return architecture == "chatglm" and "blk.0.attn_q.weight" in names


def _baichuan_config(layers: int) -> dict[str, Any]:
    """Return what the models with ALiBi have otherwise: no bound of positions."""
    if layers != BAICHUAN_13B_NUM_LAYERS:
        return {}
    return {"model_type": "baichuan", "max_position_embeddings": None}


def _granitemoe_config(facts: Mapping[str, Any], fact: Callable[..., Any]) -> dict[str, Any]:
    """Return Granite's experts, and the channels of the MLP that some have beside them."""
    beside = facts.get("granitemoe.expert_shared_feed_forward_length")
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": beside}
    return _expert_count_config(fact) | (shared if beside else {})


def _gpt_oss_config(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return gpt-oss's experts and its YaRN, whose ramp is not truncated."""
    experts = _expert_count_config(fact)
    if fact("rope.scaling.type", "none") != "yarn":
        return experts | {"rope_parameters": {"rope_type": "default"}}
    return experts | {"rope_scaling": {"truncate": False, **_yarn_scaling_options(fact)}}


def _yarn_scaling_options(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return a YaRN rotation."""
    scaling = {
        "rope_type": "yarn",
        "factor": float(fact("rope.scaling.factor")),
        "original_max_position_embeddings": int(fact("rope.scaling.original_context_length")),
    }
    for name in ("beta_fast", "beta_slow"):
        value = float(fact(f"rope.scaling.yarn_{name}", 0))
        if value:
            scaling[name] = value
    return scaling


def _mpt_config(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return MPT's bound of q, k and v, and the largest exponent of its slopes."""
    bound = float(fact("attention.clamp_kqv", 0)) or None
    largest = float(fact("attention.max_alibi_bias"))
    return {"attn_config": {"clip_qkv": bound, "alibi_bias_max": largest}}


def _deepseek_config(facts: Mapping[str, Any], fact: Callable[..., Any]) -> dict[str, Any]:
    """Return latent attention; the experts of V2 have softmax, those of V3 sigmoids, Youtu none."""
    mla = "_mla" if "deepseek2.attention.key_length_mla" in facts else ""
    turned = int(fact("rope.dimension_count"))
    config: dict[str, Any] = {
        "model_type": _deepseek_model_type(facts),
        "topk_method": "group_limited_greedy" if int(fact("expert_group_count", 1)) > 1 else None,
        "num_key_value_heads": None,
        "partial_rotary_factor": 1.0,  # of the channels that are rotated at all
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": int(fact(f"attention.key_length{mla}")) - turned,
        "v_head_dim": int(fact(f"attention.value_length{mla}")),
        "kv_lora_rank": int(fact("attention.kv_lora_rank")),
        "q_lora_rank": facts.get("deepseek2.attention.q_lora_rank"),
        "norm_topk_prob": bool(fact("expert_weights_norm", False)),
    }
    if fact("rope.scaling.type", "none") != "yarn":
        return config
    tempered = 10 * float(fact("rope.scaling.yarn_log_multiplier", 0))
    factors = {"mscale": tempered, "mscale_all_dim": tempered} if tempered else {}
    return config | {"rope_scaling": _yarn_scaling_options(fact) | factors}


def _deepseek_model_type(facts: Mapping[str, Any]) -> str:
    """Return the family; GLM-4.7-Flash, known by its sizes, has sigmoids also without the key."""
    if not int(facts.get("deepseek2.expert_count", 0)):
        return "youtu"
    predicted = int(facts.get("deepseek2.nextn_predict_layers", 0))
    layers = int(facts["deepseek2.block_count"]) - predicted
    tokens = facts.get("tokenizer.ggml.tokens") or ()
    vocabulary = int(facts.get("deepseek2.vocab_size", len(tokens)))
    unnamed = 2 if vocabulary == 154880 and layers in (47, 48) else 1
    gating = int(facts.get("deepseek2.expert_gating_func", unnamed))
    return "deepseek_v3" if gating == 2 else "deepseek_v2"


def _grouped_experts_config(fact: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    """Return the experts of GLM-4.5 and DeepSeek; the last blocks may only predict tokens."""
    predicted = int(fact("nextn_predict_layers", 0))
    return {
        "num_hidden_layers": int(fact("block_count")) - predicted,
        **grouped_router_config(fact, normalized=True),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
    }


def _gemma_config(
    facts: Mapping[str, Any], architecture: str, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return Gemma's caps, windows and bases, and what llama.cpp has fixed."""
    caps: dict[str, Any] = {
        key: float(facts[f"{architecture}.{key}"])
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
        if f"{architecture}.{key}" in facts
    }
    is_27b = sizes["num_hidden_layers"] == GEMMA_27B_NUM_LAYERS.get(architecture)
    divided = sizes["hidden_size"] // sizes["num_attention_heads"]
    every = facts.get(f"{architecture}.attention.sliding_window_pattern", 6)
    if facts.get(f"{architecture}.rope.scaling.type") == "linear":
        factor = float(facts[f"{architecture}.rope.scaling.factor"])
        caps["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return caps | {
        "query_pre_attn_scalar": divided if is_27b else sizes["head_dim"],
        "sliding_window_pattern": every,
        "rope_local_base_freq": float(facts.get(f"{architecture}.rope.freq_base_swa", 10000.0)),
        "attention_bias": False,
    }


def _alias_size_keys(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes under the names of GPT-NeoX, Falcon, ChatGLM and others."""
    eps, kv_heads = sizes["rms_norm_eps"], sizes["num_key_value_heads"]
    epsilons = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layernorm_epsilon")
    return {
        **dict.fromkeys(epsilons, eps),
        "rotary_emb_base": sizes["rope_theta"],
        "rotary_pct": sizes["partial_rotary_factor"],
        "num_kv_heads": kv_heads,
        "num_layers": sizes["num_hidden_layers"],
        "padded_vocab_size": sizes["vocab_size"],
        "kv_channels": sizes["head_dim"],
        "seq_length": sizes["max_position_embeddings"],
        "multi_query_attention": True,
        "multi_query_group_num": kv_heads,
        "rope_ratio": sizes["rope_theta"] / 10000.0,
    }


def _multiplier_config(fact: Callable[..., Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of Granite, MiniCPM and Cohere, and what llama.cpp has fixed."""
    depth = sizes["num_hidden_layers"] ** 0.5
    logits = float(fact("logit_scale", 1.0))
    return {
        "attention_multiplier": float(fact("attention.scale", sizes["head_dim"] ** -0.5)),
        "embedding_multiplier": float(fact("embedding_scale", 1.0)),
        "scale_emb": float(fact("embedding_scale", 1.0)),
        "residual_multiplier": float(fact("residual_scale", 1.0)),
        "scale_depth": float(fact("residual_scale", 1 / depth)) * depth,
        "logits_scaling": logits,
        "logit_scale": logits,
        "dim_model_base": sizes["hidden_size"] / logits,
        "no_rope_layer_interval": 4,
        "sliding_window_pattern": 4,
    }


def _flags_from_tensor_names(names: list[str]) -> dict[str, Any]:
    """Return what the tensors say."""
    bias, fused_bias = "blk.0.attn_q.bias" in names, "blk.0.attn_qkv.bias" in names
    return {
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": bias or fused_bias,
        "use_bias": bias,
        "use_qkv_bias": bias,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "bias": fused_bias,
        "add_qkv_bias": fused_bias,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in names else 1,
    }


def reference_rope_from_gguf(container: RawContainer, config: Mapping[str, Any]) -> ReferenceRope:
    """Return the rotary embedding: scaling by metadata (linear, yarn), or rope_freqs.weight.

    Raises:
        UnknownArchitecture: for keys that scale cos and sin or shift yarn's ramp, unless they are
            neutral.
    """
    facts, model_type = container.metadata, config["model_type"]
    dim = int(facts.get(f"{model_type}.rope.dimension_count", config["head_dim"]))
    theta, length = config["rope_theta"], config["max_position_embeddings"]
    stated = {
        key[len(f"{model_type}.rope.scaling.") :]: v
        for key, v in facts.items()
        if key.startswith(f"{model_type}.rope.scaling.")
    }
    scaling = str(stated.get("type", "linear"))
    for name, idle in (("attn_factor", 1), ("yarn_attn_factor", 1), ("yarn_log_multiplier", 0)):
        if stated.get(name, idle) != idle:
            raise UnknownArchitecture(
                f"the GGUF's rope.scaling.{name} is {stated[name]}, which is not known here"
            )
    mixed = stated.get("yarn_ext_factor", -1)
    if mixed >= 0 and mixed != (scaling == "yarn"):
        raise UnknownArchitecture(
            f"the GGUF's rope.scaling.yarn_ext_factor is {mixed}, which is not known here"
        )
    if "rope_freqs.weight" in container.names():
        return ReferenceRope(
            dim, theta, length, "factors", factors=container.get("rope_freqs.weight").float()
        )
    factor = stated.get("factor") or facts.get(f"{model_type}.rope.scale_linear")
    if scaling == "none" or not factor:
        return ReferenceRope(dim, theta, length)
    options = {
        "factor": factor,
        "original_max_position_embeddings": stated.get("original_context_length"),
    }
    options |= {name: stated.get(f"yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return ReferenceRope(dim, theta, length, scaling, options)

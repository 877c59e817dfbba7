"""GGUF architectures of dense families with one property of their own each.

Names of tensors as GPT-2's (EXAONE 3), two matrices in the MLP (AFM, Nemotron, Jais 2), parallel
layers (Command R), norms without weights (OLMo 1), windows (OLMo 3), LongRoPE (Phi-3), queries that
grow with the position (Ministral 3), a single key and value (StarCoder).
"""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import (
    SLIDING_WINDOW_KEY,
    ArchitectureKeys,
    head_dim,
    prefix_errors_with_path,
    read_window_layer_types,
    yarn_mscale_rope_scaling,
)
from modelmill.checkpoint.gguf_families import (
    GLM_NAMES,
    GPT2_NAMES,
    LLAMA_NAMES,
    POST_NORM_NAMES,
    GgufArchitecture,
    read_bias_flags,
    read_common_config,
    read_rms_config,
)
from modelmill.checkpoint.gguf_rope_scaling import rope_scaling_from_longrope
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

PLAIN_MLP_NAMES = {name: hf for name, hf in LLAMA_NAMES.items() if name != "blk.ffn_gate"}
PHI3_NAMES = {**GLM_NAMES, "blk.attn_qkv": "self_attn.qkv_proj"}
SEED_OSS_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_norm"},
    "blk.post_attention_norm": "post_attention_layernorm",
}
EXAONE_NAMES = {
    **GPT2_NAMES,
    **{f"blk.attn_{part}": f"attn.attention.{part}_proj" for part in "qkv"},
    "blk.attn_output": "attn.attention.out_proj",
    "blk.ffn_gate": "mlp.c_fc_0",
    "blk.ffn_up": "mlp.c_fc_1",
}
LONGROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")
OLMO_EPS = 1e-5  # of all models; config.json has none
LAYER_NORM_EPS_KEY = "attention.layer_norm_epsilon"
TEMPERATURE_SCALE_KEY = "attention.temperature_scale"


def _read_biased_config(keys: ArchitectureKeys) -> dict[str, Any]:
    config = {**read_rms_config(keys), **read_bias_flags(keys)}
    return {**config, "head_dim": head_dim(keys)}


def _read_nemotron_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **read_common_config(keys, partial=True),
        **read_bias_flags(keys),
        "norm_eps": keys.get_positive_float(LAYER_NORM_EPS_KEY),
    }


def _read_jais2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **read_common_config(keys),
        **read_bias_flags(keys),
        "head_dim": head_dim(keys),
        "layer_norm_eps": keys.get_positive_float(LAYER_NORM_EPS_KEY),
    }


def _read_seed_oss_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **read_rms_config(keys),
        **read_bias_flags(keys),
        "attention_out_bias": keys.has_tensor("blk.0.attn_output.bias"),
        "head_dim": head_dim(keys),
    }


def _read_command_r_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **read_common_config(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "layer_norm_eps": keys.get_positive_float(LAYER_NORM_EPS_KEY),
        "logit_scale": keys.get_positive_float("logit_scale"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _read_olmo_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read OLMo 1; a bound of 0 is none.

    Raises:
        UnknownArchitecture: for another epsilon than that of all models.
    """
    eps = keys.get_positive_float(LAYER_NORM_EPS_KEY, OLMO_EPS)
    if eps != OLMO_EPS:
        raise UnknownArchitecture(
            f"{keys.raw.path}: the key olmo.{LAYER_NORM_EPS_KEY} is {eps}; modelmill computes "
            f"{OLMO_EPS}"
        )
    bound = "attention.clamp_kqv"
    return {
        **read_common_config(keys),
        "clip_qkv": keys.get_positive_float(bound) if keys.is_nonzero(bound) else None,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _read_olmo2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read OLMo 2, or with windows OLMo 3, whose layers with a window are not scaled."""
    config = {**read_rms_config(keys), "attention_bias": keys.has_tensor("blk.0.attn_q.bias")}
    if SLIDING_WINDOW_KEY not in keys:
        return {**config, "model_type": "olmo2"}
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    plain = {"rope_type": "default"}
    return {
        **config,
        "model_type": "olmo3",
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(scaling or plain)},
            "sliding_attention": {"rope_theta": theta, **plain},
        },
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY),
        "layer_types": read_window_layer_types(keys, config["num_hidden_layers"]),
    }


def _read_phi3_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Phi-3, 3.5 and 4; a window of 0 is none.

    Raises:
        CheckpointError: for factors of LongRoPE that do not fit, or an unknown scaling.
    """
    trained = "rope.scaling.original_context_length"
    has_factors = any(keys.has_tensor(name) for name in LONGROPE_TENSORS)
    scaling = _read_longrope_scaling(keys) if has_factors else None
    config = read_rms_config(keys, partial=True, scaled=not has_factors)
    context = config["max_position_embeddings"]
    return {
        **config,
        "rope_scaling": scaling or config["rope_scaling"],
        "original_max_position_embeddings": keys.get_positive_int(trained, context),
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY)
        if keys.is_nonzero(SLIDING_WINDOW_KEY)
        else None,
    }


def _read_longrope_scaling(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read LongRoPE's factors, and what cosines and sines are multiplied by."""
    raw, channels = keys.raw, head_dim(keys, partial=True)
    rotated = keys.get_positive_int("rope.dimension_count", channels)
    lists = []
    for name in LONGROPE_TENSORS:
        if not keys.has_tensor(name):
            raise CorruptCheckpoint(
                f"{raw.path}: has no {name} beside the factors of other lengths"
            )
        shape = raw.tensor_info(name).shape
        if shape != (rotated // 2,):
            raise CorruptCheckpoint(
                f"{raw.path}: {name} has {list(shape)}, not one number for each of the "
                f"{rotated // 2} frequencies"
            )
        lists.append(raw.get(name).float().tolist())
    with prefix_errors_with_path(raw):
        return rope_scaling_from_longrope(keys.view, keys.arch, lists[1], lists[0])


def _read_mistral3_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Ministral 3, or, without a temperature, the text half of a Mistral 3, a Mistral."""
    config = {**read_rms_config(keys, scaled=False), "head_dim": head_dim(keys)}
    scaling = yarn_mscale_rope_scaling(keys)
    if TEMPERATURE_SCALE_KEY not in keys:
        return {**config, "model_type": "mistral", "rope_scaling": scaling}
    if scaling is None or scaling["rope_type"] != "yarn":
        raise UnknownArchitecture(
            f"{keys.raw.path}: has {TEMPERATURE_SCALE_KEY} without a scaling of type yarn; use "
            "its Hugging Face folder"
        )
    slope = keys.get_positive_float(TEMPERATURE_SCALE_KEY)
    theta = config.pop("rope_theta")
    rope = {"rope_theta": theta, **scaling, "llama_4_scaling_beta": slope}
    return {**config, "model_type": "ministral3", "rope_scaling": None, "rope_parameters": rope}


def _read_starcoder_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read StarCoder 1; the file does not name the activation, llama.cpp has it fixed.

    Raises:
        UnknownArchitecture: for several keys and values, which the converter does not tell.
    """
    kv_heads = keys.get_positive_int("attention.head_count_kv", 1)
    if kv_heads != 1:
        raise UnknownArchitecture(
            f"{keys.raw.path}: the key starcoder.attention.head_count_kv is {kv_heads}; modelmill "
            "reads GGUFs of StarCoder with one key and value"
        )
    return {
        "n_embd": keys.get_positive_int("embedding_length"),
        "n_layer": keys.get_positive_int("block_count"),
        "n_head": keys.get_positive_int("attention.head_count"),
        "n_positions": keys.get_positive_int("context_length"),
        "n_inner": keys.get_positive_int("feed_forward_length"),
        "layer_norm_epsilon": keys.get_positive_float(LAYER_NORM_EPS_KEY),
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    }


DENSE_ARCHITECTURES = {
    "arcee": GgufArchitecture(
        PLAIN_MLP_NAMES, has_permuted_qk=True, read_config=_read_biased_config
    ),
    "nemotron": GgufArchitecture(
        PLAIN_MLP_NAMES, norms_plus_one=True, read_config=_read_nemotron_config
    ),
    "exaone": GgufArchitecture(EXAONE_NAMES, "transformer.h", read_config=_read_biased_config),
    "jais2": GgufArchitecture(PLAIN_MLP_NAMES, read_config=_read_jais2_config),
    "seed_oss": GgufArchitecture(SEED_OSS_NAMES, read_config=_read_seed_oss_config),
    "command-r": GgufArchitecture(
        LLAMA_NAMES, model_type="cohere", read_config=_read_command_r_config
    ),
    "olmo": GgufArchitecture(LLAMA_NAMES, has_permuted_qk=True, read_config=_read_olmo_config),
    "olmo2": GgufArchitecture(
        POST_NORM_NAMES, read_config=_read_olmo2_config, chosen_types=("olmo2", "olmo3")
    ),
    "phi3": GgufArchitecture(PHI3_NAMES, read_config=_read_phi3_config),
    "mistral3": GgufArchitecture(
        LLAMA_NAMES,
        has_permuted_qk=True,
        read_config=_read_mistral3_config,
        chosen_types=("mistral", "ministral3"),
    ),
    "starcoder": GgufArchitecture(
        GPT2_NAMES, "transformer.h", model_type="gpt_bigcode", read_config=_read_starcoder_config
    ),
}

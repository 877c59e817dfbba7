"""GGUF architectures of further families: their tensors' names, and their keys as config.json's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

import torch

from modelmill.checkpoint.gguf_config import (
    SLIDING_WINDOW_KEY,
    ArchitectureKeys,
    ConfigReader,
    head_dim,
    read_window_layer_types,
    rope_scaling,
)
from modelmill.core.errors import UnknownArchitecture


@dataclass(frozen=True)
class ReorderedTensorSlice:
    """A tensor of a folder that is some rows or columns of one in the file, in another order.

    Attributes:
        name: Its name within the layer, without suffix.
        units: Into how many equal parts the file's tensor is divided.
        order: Which of them it is, one after another.
        axis: 0: rows, 1: columns.
    """

    name: str
    units: int
    order: tuple[int, ...]
    axis: int = 0

    def fits_shape(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape has so many equal parts."""
        return len(shape) > self.axis and shape[self.axis] % self.units == 0

    def sliced_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape, from that in the file."""
        length = shape[self.axis] // self.units * len(self.order)
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its values, or its blocks of codes, from those in the file."""
        units = tensor.unflatten(self.axis, (self.units, -1))
        chosen = units.index_select(self.axis, torch.tensor(self.order))
        return chosen.flatten(self.axis, self.axis + 1)


@dataclass(frozen=True)
class GgufArchitecture:
    """How one GGUF architecture maps to Hugging Face.

    Attributes:
        names: of tensors, without layer and suffix.
        layer_prefix: the prefix of a layer's names.
        has_permuted_qk: whether the rows of q and k are reordered for interleaved rotation.
        transposed: whether matrices are transposed.
        grouped_qkv: whether the family has q, k and v of "blk.attn_qkv" by KV head.
        variant: a tensor, and the architecture where the file has it.
        norms_plus_one: whether norms are stored plus 1 (Gemma's).
        model_type: the family; empty: named as the architecture.
        read_config: reads the keys; None: ``gguf_config`` does.
        joins_latent: whether "blk.attn_k_b" and "blk.attn_v_b" are one matrix.
        chosen_types: families of which ``read_config`` chooses one.
        alike_types: families that the converter writes so, too; they are read as one of those
            above, which computes the same.
        parts: makes, from the config, the parts of tensors that are stored in another order.
        draft_prefix: what the names of layers that only predict begin with; empty: none are.
        numbers_by_layer: metadata with a number for each layer → the tensor that it is in a layer,
            and its shape.
    """

    names: dict[str, str]
    layer_prefix: str = "model.layers"
    has_permuted_qk: bool = False
    transposed: bool = False
    grouped_qkv: bool = False
    variant: tuple[str, GgufArchitecture] | None = None
    norms_plus_one: bool = False
    model_type: str = ""
    read_config: ConfigReader | None = None
    joins_latent: bool = False
    chosen_types: tuple[str, ...] = ()
    alike_types: tuple[str, ...] = ()
    parts: Callable[[Mapping[str, Any]], Mapping[str, tuple[ReorderedTensorSlice, ...]]] | None = (
        None
    )
    draft_prefix: str = ""
    numbers_by_layer: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.attn_q_norm": "self_attn.q_norm",
    "blk.attn_k_norm": "self_attn.k_norm",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
TRANSFORMER_H_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "ln_1",
    "blk.attn_qkv": "attn.c_attn",
    "blk.attn_output": "attn.c_proj",
    "blk.ffn_norm": "ln_2",
    "blk.ffn_down": "mlp.c_proj",
}
"""What GPT-2 and Qwen v1 have in common."""
GPT2_NAMES = {
    **TRANSFORMER_H_NAMES,
    "position_embd": "transformer.wpe",
    "blk.ffn_up": "mlp.c_fc",
}
EXPERT_NAMES = {
    f"blk.ffn_{part}_exps": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")
}
MIXTRAL_EXPERT_TENSORS = {
    part: f"block_sparse_moe.experts.*.{name}"
    for part, name in zip(EXPERT_NAMES, ("w1", "w3", "w2"), strict=True)
}
POST_NORM_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if not gguf.endswith("_norm")},
    "output_norm": "model.norm",
    "blk.attn_q_norm": "self_attn.q_norm",
    "blk.attn_k_norm": "self_attn.k_norm",
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NAMES = {
    **LLAMA_NAMES,
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}
GPT_OSS_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if "ffn" not in gguf},
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_sinks": "self_attn.sinks",
    "blk.ffn_gate_inp": "mlp.router",
    **EXPERT_NAMES,
}
GRANITE_MOE_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if not gguf.startswith("blk.ffn_")},
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate_inp": "block_sparse_moe.router.layer",
    # of a folder's stacks the experts one by one
    "blk.ffn_gate_exps": "block_sparse_moe.input_linear.*.gate",
    "blk.ffn_up_exps": "block_sparse_moe.input_linear.*.up",
    "blk.ffn_down_exps": "block_sparse_moe.output_linear.*",
    # the MLP beside them, in some; a folder has gate and up in one matrix
    "blk.ffn_gate_shexp": "shared_mlp.input_linear.gate",
    "blk.ffn_up_shexp": "shared_mlp.input_linear.up",
    "blk.ffn_down_shexp": "shared_mlp.output_linear",
}
GLM_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_gate"},
    "blk.ffn_up": "mlp.gate_up_proj",
}
GLM4_NAMES = {
    **GLM_NAMES,
    "blk.post_attention_norm": "post_self_attn_layernorm",
    "blk.post_ffw_norm": "post_mlp_layernorm",
}
PHI_NAMES = {
    **LLAMA_NAMES,
    "output_norm": "model.final_layernorm",
    "blk.attn_output": "self_attn.dense",
    "blk.ffn_up": "mlp.fc1",
    "blk.ffn_down": "mlp.fc2",
}
MEGATRON_LAYER_NAMES = {
    "blk.attn_norm": "input_layernorm",
    "blk.attn_qkv": "self_attention.query_key_value",
    "blk.attn_output": "self_attention.dense",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
CHATGLM_NAMES = {
    **MEGATRON_LAYER_NAMES,
    "token_embd": "transformer.embedding.word_embeddings",
    "output_norm": "transformer.encoder.final_layernorm",
    "output": "transformer.output_layer",
}
GPT_NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_qkv": "attention.query_key_value",
    "blk.attn_output": "attention.dense",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
FALCON_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_qkv": "self_attention.query_key_value",
    "blk.attn_output": "self_attention.dense",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
FALCON_TWO_NORM_NAMES = {
    **FALCON_NAMES,
    "blk.attn_norm": "ln_mlp",
    "blk.attn_norm_2": "ln_attn",
}
BITNET_NAMES = {
    **LLAMA_NAMES,
    "blk.attn_sub_norm": "self_attn.attn_sub_norm",
    "blk.ffn_sub_norm": "mlp.ffn_sub_norm",
}
STARCODER2_NAMES = {**LLAMA_NAMES, "blk.ffn_up": "mlp.c_fc", "blk.ffn_down": "mlp.c_proj"}


# the depth of the only models whose scores are scaled by another number than a head's channels
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62


def read_common_config(
    keys: ArchitectureKeys,
    *,
    partial: bool = False,
    inner: str = "feed_forward_length",
    scaled: bool = True,
) -> dict[str, Any]:
    """Read what all have.

    Args:
        keys: The file's.
        partial: Of families that rotate a part of each head.
        inner: The key with the channels of an MLP.
        scaled: Whether the scaling of positions is read; else it is None.
    """
    heads, theta = (
        keys.get_positive_int("attention.head_count"),
        keys.get_positive_float("rope.freq_base", 10000.0),
    )
    channels, width = head_dim(keys, partial=partial), keys.get_positive_int("embedding_length")
    config = {
        "hidden_size": width,
        "intermediate_size": keys.get_positive_int(inner),
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get_positive_int("attention.head_count_kv", heads),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(keys, theta) if scaled else None,
    }
    if channels * heads != width:
        config["head_dim"] = channels
    if partial:
        rotated = keys.get_positive_int("rope.dimension_count", channels)
        config["partial_rotary_factor"] = rotated / channels
    return config


class CommonConfigOptions(TypedDict, total=False):
    """The arguments of ``read_common_config``."""

    partial: bool
    inner: str
    scaled: bool


def read_rms_config(
    keys: ArchitectureKeys, **options: Unpack[CommonConfigOptions]
) -> dict[str, Any]:
    """Read what all with RMSNorm have."""
    eps = keys.get_positive_float("attention.layer_norm_rms_epsilon")
    return {**read_common_config(keys, **options), "rms_norm_eps": eps}


def read_bias_flags(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read from the tensors whether the first layer's projections have biases."""
    return {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
    }


def _read_granite_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {**read_rms_config(keys), **read_bias_flags(keys), **read_granite_multipliers(keys)}


def read_granite_multipliers(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Granite's factors, each 1 without its key but for that of the scores."""
    return {
        "attention_multiplier": keys.get_positive_float("attention.scale", head_dim(keys) ** -0.5),
        "embedding_multiplier": keys.get_positive_float("embedding_scale", 1.0),
        "residual_multiplier": keys.get_positive_float("residual_scale", 1.0),
        "logits_scaling": keys.get_positive_float("logit_scale", 1.0),
    }


def _read_granitemoe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Granite with experts, in some beside an MLP that every token has."""
    config = {
        **_read_granite_config(keys),
        "num_local_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
    }
    shared = "expert_shared_feed_forward_length"
    if shared not in keys:
        return {**config, "model_type": "granitemoe"}
    return {
        **config,
        "model_type": "granitemoeshared",
        "shared_intermediate_size": keys.get_positive_int(shared),
    }


def _read_minicpm_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read MiniCPM's factors, which the file has as they are multiplied."""
    config = read_rms_config(keys)
    depth = keys.get_positive_float("residual_scale", config["num_hidden_layers"] ** -0.5)
    return {
        **config,
        "scale_emb": keys.get_positive_float("embedding_scale", 1.0),
        "scale_depth": depth * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": round(
            config["hidden_size"] / keys.get_positive_float("logit_scale", 1.0)
        ),
    }


def _read_starcoder2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    eps = keys.get_positive_float("attention.layer_norm_epsilon")
    bias = keys.has_tensor("blk.0.attn_q.bias")
    return {**read_common_config(keys), "norm_epsilon": eps, "use_bias": bias}


def _read_bitnet_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read BitNet; the older files, which do not name the activation, have SiLU."""
    act = keys.view.get(f"{keys.arch}.hidden_activation", "silu")
    bias = keys.has_tensor("blk.0.attn_q.bias")
    return {**read_rms_config(keys), "hidden_act": act, "attention_bias": bias}


def _read_smollm3_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read SmolLM3: every fourth layer is not rotated, as llama.cpp has it fixed."""
    return {**read_rms_config(keys), **read_bias_flags(keys), "no_rope_layer_interval": 4}


def _read_cohere2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Cohere 2: every fourth layer has full attention, as llama.cpp has it fixed."""
    return {
        **read_common_config(keys),
        "layer_norm_eps": keys.get_positive_float("attention.layer_norm_epsilon"),
        "logit_scale": keys.get_positive_float("logit_scale"),
        "sliding_window": keys.get_positive_int("attention.sliding_window"),
        "sliding_window_pattern": 4,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _read_glm_config(keys: ArchitectureKeys) -> dict[str, Any]:
    config = read_rms_config(keys, partial=True)
    config["head_dim"] = head_dim(keys, partial=True)
    return {**config, "attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


def _read_ernie4_5_config(keys: ArchitectureKeys) -> dict[str, Any]:
    bias = keys.has_tensor("blk.0.attn_q.bias")
    return {**read_rms_config(keys), "head_dim": head_dim(keys), "use_bias": bias}


def _read_phi_config(keys: ArchitectureKeys) -> dict[str, Any]:
    eps = keys.get_positive_float("attention.layer_norm_epsilon")
    return {**read_common_config(keys, partial=True), "layer_norm_eps": eps}


def _read_stablelm_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {
        **read_common_config(keys, partial=True),
        "layer_norm_eps": keys.get_positive_float("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.get_flag("use_parallel_residual", True),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _read_exaone4_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read EXAONE 4; some have windows."""
    config = {**read_rms_config(keys), "sliding_window": None}
    if SLIDING_WINDOW_KEY in keys:
        config["sliding_window"] = keys.get_positive_int(SLIDING_WINDOW_KEY)
        config["layer_types"] = read_window_layer_types(keys, config["num_hidden_layers"])
    return config


def _read_chatglm_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read ChatGLM2, ChatGLM3 and the first GLM-4, of which half a head rotates."""
    config = read_rms_config(keys, partial=True)
    channels = head_dim(keys, partial=True)
    if config["partial_rotary_factor"] != 0.5 or config["rope_scaling"] is not None:
        raise UnknownArchitecture(f"{keys.raw.path}: rotates another part than half of a head")
    return {
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_layers": config["num_hidden_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "padded_vocab_size": keys.raw.tensor_info("token_embd.weight").shape[0],
        "kv_channels": channels,
        "seq_length": config["max_position_embeddings"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": config["rope_theta"] / 10000.0,
        "add_qkv_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
    }


def _read_gpt_neox_config(keys: ArchitectureKeys) -> dict[str, Any]:
    config = read_common_config(keys, partial=True)
    del config["num_key_value_heads"]
    theta, share = config.pop("rope_theta"), config.pop("partial_rotary_factor")
    return {
        **config,
        "rotary_emb_base": theta,
        "rotary_pct": share,
        "layer_norm_eps": keys.get_positive_float("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.get_flag("use_parallel_residual", True),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
    }


def _read_falcon_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Falcon; those without a norm for each branch may have one KV head or several."""
    config = read_common_config(keys)
    kv_heads, inner = config.pop("num_key_value_heads"), config.pop("intermediate_size")
    two = keys.has_tensor("blk.0.attn_norm_2.weight")
    return {
        **config,
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_epsilon"),
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": inner,
        "bias": keys.has_tensor("blk.0.attn_qkv.bias"),
    }


def _read_gemma_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {**read_rms_config(keys), "head_dim": head_dim(keys)}


def _read_gemma2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Gemma 2; the factor of the scores is not in the file, llama.cpp has it by depth."""
    return {
        **_read_gemma_config(keys),
        "attn_logit_softcapping": keys.get_positive_float("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get_positive_float("final_logit_softcapping", 30.0),
        "sliding_window": keys.get_positive_int("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma2_query_scalar(keys, GEMMA2_27B_LAYERS),
    }


def _read_gemma3_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Gemma 3; every sixth layer has full attention, as llama.cpp has it fixed."""
    config = _read_gemma_config(keys)
    if "final_logit_softcapping" in keys:
        config["final_logit_softcapping"] = keys.get_positive_float("final_logit_softcapping")
    return {
        **config,
        "rope_local_base_freq": keys.get_positive_float("rope.freq_base_swa", 10000.0),
        "sliding_window": keys.get_positive_int("attention.sliding_window"),
        "sliding_window_pattern": keys.get_positive_int("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": _gemma2_query_scalar(keys, GEMMA3_27B_LAYERS),
    }


def _read_gpt_oss_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read gpt-oss; that YaRN's ramp is not truncated belongs to the architecture."""
    config = read_rms_config(keys)
    if config["rope_scaling"] is not None:
        config["rope_scaling"] |= {"truncate": False}
    return {
        **config,
        "head_dim": head_dim(keys),
        "intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "num_local_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "sliding_window": keys.get_positive_int("attention.sliding_window"),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _gemma2_query_scalar(keys: ArchitectureKeys, largest: int) -> int:
    """The number whose root divides the scores: channels of a head; in 27B, width by heads."""
    if keys.get_positive_int("block_count") == largest:
        return keys.get_positive_int("embedding_length") // keys.get_positive_int(
            "attention.head_count"
        )
    return head_dim(keys)


FALCON_ARCHITECTURE = GgufArchitecture(
    FALCON_NAMES, "transformer.h", grouped_qkv=True, read_config=_read_falcon_config
)
GGUF_FAMILY_ARCHITECTURES = {
    "gpt-oss": GgufArchitecture(
        GPT_OSS_NAMES, model_type="gpt_oss", read_config=_read_gpt_oss_config
    ),
    "gemma": GgufArchitecture(LLAMA_NAMES, norms_plus_one=True, read_config=_read_gemma_config),
    "gemma2": GgufArchitecture(GEMMA_NAMES, norms_plus_one=True, read_config=_read_gemma2_config),
    "gemma3": GgufArchitecture(
        GEMMA_NAMES, norms_plus_one=True, model_type="gemma3_text", read_config=_read_gemma3_config
    ),
    "granite": GgufArchitecture(
        LLAMA_NAMES, has_permuted_qk=True, read_config=_read_granite_config
    ),
    "granitemoe": GgufArchitecture(
        GRANITE_MOE_NAMES,
        has_permuted_qk=True,
        read_config=_read_granitemoe_config,
        chosen_types=("granitemoe", "granitemoeshared"),
    ),
    "bitnet": GgufArchitecture(BITNET_NAMES, read_config=_read_bitnet_config),
    "minicpm": GgufArchitecture(
        LLAMA_NAMES, has_permuted_qk=True, read_config=_read_minicpm_config
    ),
    "smollm3": GgufArchitecture(
        LLAMA_NAMES, has_permuted_qk=True, read_config=_read_smollm3_config
    ),
    "xverse": GgufArchitecture(LLAMA_NAMES, has_permuted_qk=True, read_config=read_rms_config),
    "internlm2": GgufArchitecture(
        LLAMA_NAMES,
        has_permuted_qk=True,
        model_type="llama",
        read_config=lambda keys: {**read_rms_config(keys), **read_bias_flags(keys)},
    ),
    "starcoder2": GgufArchitecture(STARCODER2_NAMES, read_config=_read_starcoder2_config),
    "cohere2": GgufArchitecture(LLAMA_NAMES, read_config=_read_cohere2_config),
    "ernie4_5": GgufArchitecture(LLAMA_NAMES, read_config=_read_ernie4_5_config),
    "glm4": GgufArchitecture(GLM4_NAMES, read_config=_read_glm_config),
    "stablelm": GgufArchitecture(LLAMA_NAMES, read_config=_read_stablelm_config),
    "exaone4": GgufArchitecture(POST_NORM_NAMES, read_config=_read_exaone4_config),
    "chatglm": GgufArchitecture(
        CHATGLM_NAMES,
        "transformer.encoder.layers",
        read_config=_read_chatglm_config,
        variant=(
            "blk.0.attn_q.weight",
            GgufArchitecture(GLM_NAMES, model_type="glm", read_config=_read_glm_config),
        ),
        chosen_types=("chatglm", "glm"),
    ),
    "gptneox": GgufArchitecture(
        GPT_NEOX_NAMES,
        "gpt_neox.layers",
        grouped_qkv=True,
        model_type="gpt_neox",
        read_config=_read_gpt_neox_config,
    ),
    "falcon": replace(
        FALCON_ARCHITECTURE,
        variant=(
            "blk.0.attn_norm_2.weight",
            replace(FALCON_ARCHITECTURE, names=FALCON_TWO_NORM_NAMES),
        ),
    ),
    "phi2": GgufArchitecture(PHI_NAMES, model_type="phi", read_config=_read_phi_config),
}

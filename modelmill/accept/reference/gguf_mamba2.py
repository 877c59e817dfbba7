"""The config and the tensors of GGUFs with Mamba2, alone or in Granite 4, as they are converted.

llama.cpp's converter stores A = −exp(A_log) and D as columns, the weight of the gated norm by
group, and the convolution as a matrix.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gguf_source import GgufConfigReaderAndSource, GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

MAMBA2_ARCHITECTURE, GRANITE_HYBRID_ARCHITECTURE, FALCON_H1_ARCHITECTURE = (
    "mamba2",
    "granitehybrid",
    "falcon-h1",
)
HF_TO_GGUF_TENSORS = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
# 1 without the key
HF_TO_GGUF_MULTIPLIER_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def gguf_ssm_tensor_name(mixer_tensor: str) -> str:
    """Return GGUF's name of a recurrence's tensor, as "conv1d.weight"."""
    module, _, leaf = mixer_tensor.rpartition(".")
    if not module:
        return HF_TO_GGUF_TENSORS[mixer_tensor]
    return f"ssm_{module.removesuffix('_proj')}.{leaf}"


def undo_gguf_ssm_conversion(name: str, tensor: Tensor) -> Tensor:
    """Return a recurrence's tensor as it was before the conversion."""
    if name.endswith(".A_log"):
        return (-tensor.float()).log().flatten()
    if name.endswith((".D", ".norm.weight")):
        return tensor.flatten()
    # a matrix, or as it was
    return tensor.flatten(1)[:, None] if name.endswith(".conv1d.weight") else tensor


def mamba2_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()
    heads, inner = (
        int(facts[f"{MAMBA2_ARCHITECTURE}.ssm.{key}"]) for key in ("time_step_rank", "inner_size")
    )
    return {
        "model_type": "mamba2",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": int(facts[f"{MAMBA2_ARCHITECTURE}.embedding_length"]),
        "num_hidden_layers": int(facts[f"{MAMBA2_ARCHITECTURE}.block_count"]),
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": int(facts[f"{MAMBA2_ARCHITECTURE}.ssm.state_size"]),
        "n_groups": int(facts.get(f"{MAMBA2_ARCHITECTURE}.ssm.group_count", 1)),
        "layer_norm_epsilon": float(
            facts[f"{MAMBA2_ARCHITECTURE}.attention.layer_norm_rms_epsilon"]
        ),
        "use_bias": "blk.0.ssm_in.bias" in names,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }


class Mamba2GgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        layer, mixes, part = name.removeprefix("backbone.layers.").partition(".mixer.")
        return (
            f"blk.{layer}.{gguf_ssm_tensor_name(part)}"
            if mixes
            else super().stored_tensor_name(name)
        )

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().read_uncast_tensor(name)
        return undo_gguf_ssm_conversion(name, tensor) if ".mixer." in name else tensor


def granite_hybrid_config(container: RawContainer) -> dict[str, Any]:
    """Return Granite 4's config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{GRANITE_HYBRID_ARCHITECTURE}.{key}", default)

    kv_heads = [int(each) for each in fact("attention.head_count_kv")]
    attention, mamba = kv_heads.index(max(kv_heads)), kv_heads.index(0)
    width, heads = int(fact("embedding_length")), int(fact("attention.head_count"))
    return {
        "model_type": "granitemoehybrid",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": width,
        "num_hidden_layers": len(kv_heads),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads),
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "position_embedding_type": "rope" if fact("rope.scaling.finetuned") else "nope",
        "attention_bias": f"blk.{attention}.attn_q.bias" in names,
        "layer_types": ["attention" if each else "mamba" for each in kv_heads],
        "num_local_experts": int(fact("expert_count", 0)),
        "num_experts_per_tok": int(fact("expert_used_count", 0)),
        "attention_multiplier": float(fact("attention.scale", (width / heads) ** -0.5)),
        **{name: float(fact(key, 1.0)) for name, key in HF_TO_GGUF_MULTIPLIER_KEYS.items()},
        "mamba_expand": int(fact("ssm.inner_size")) // width,
        "mamba_n_heads": int(fact("ssm.time_step_rank")),
        "mamba_d_state": int(fact("ssm.state_size")),
        "mamba_n_groups": int(fact("ssm.group_count")),
        "mamba_proj_bias": f"blk.{mamba}.ssm_in.bias" in names,
        "mamba_conv_bias": f"blk.{mamba}.ssm_conv1d.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }


def falcon_h1_config(container: RawContainer) -> dict[str, Any]:
    """Return Falcon-H1's config; its multipliers are in the weights, a norm behind the gate."""
    facts, names = container.metadata, container.names()

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{FALCON_H1_ARCHITECTURE}.{key}", default)

    heads = int(fact("attention.head_count"))
    return {
        "model_type": "falcon_h1",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": int(fact("embedding_length")),
        "num_hidden_layers": int(fact("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": fact("attention.key_length"),
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "mamba_d_ssm": int(fact("ssm.inner_size")),
        "mamba_n_heads": int(fact("ssm.time_step_rank")),
        "mamba_d_state": int(fact("ssm.state_size")),
        "mamba_n_groups": int(fact("ssm.group_count")),
        "mamba_proj_bias": "blk.0.ssm_in.bias" in names,
        "projectors_bias": "blk.0.ssm_out.bias" in names,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in names,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in names,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": "output.weight" not in names,
    }


class HybridGgufSource(GgufSource):
    """The container of Granite 4 or Falcon-H1 under Hugging Face names."""

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        index, _, part = name.removeprefix("model.layers.").partition(".")
        if part == "pre_ff_layernorm.weight":
            return f"blk.{index}.ffn_norm"  # without a suffix
        if part.startswith("mamba."):
            return f"blk.{index}.{gguf_ssm_tensor_name(part.removeprefix('mamba.'))}"
        for linear, matrix in (("input_linear", "gate"), ("up_linear", "up"), ("", "down")):
            if part.startswith(f"shared_mlp.{linear}"):
                beside = f"blk.{index}.ffn_{matrix}_shexp.weight"
                return beside if beside in self._names else f"blk.{index}.ffn_{matrix}.weight"
        return super().stored_tensor_name(name)

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().read_uncast_tensor(name)
        return undo_gguf_ssm_conversion(name, tensor) if ".mamba." in name else tensor


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = {
    MAMBA2_ARCHITECTURE: (mamba2_config, Mamba2GgufSource),
    GRANITE_HYBRID_ARCHITECTURE: (granite_hybrid_config, HybridGgufSource),
    FALCON_H1_ARCHITECTURE: (falcon_h1_config, HybridGgufSource),
}

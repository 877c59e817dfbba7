"""The config and the tensors of GGUFs with Gated DeltaNet, as they are converted.

llama.cpp's converter stores norms plus 1, but for the gated one; A = −exp(A_log); the convolution
as a matrix; and the heads of values of Qwen3.5 so that head p reads the head of keys p mod K.
Qwen3-Next's heads of values are in their own order; b and a, and in older files q, k, v and z, are
one matrix there, by head of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.gguf_source import GgufConfigReaderAndSource, GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

QWEN3_NEXT_ARCHITECTURE, QWEN35_ARCHITECTURE, QWEN35_MOE_ARCHITECTURE = (
    "qwen3next",
    "qwen35",
    "qwen35moe",
)
LINEAR_ATTENTION_TENSORS = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
}
GATE_UP_CHUNK_INDEX = {"gate_proj": 0, "up_proj": 1}


def delta_net_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()
    architecture = str(facts["general.architecture"])

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{architecture}.{key}", default)

    width, heads = int(fact("embedding_length")), int(fact("attention.head_count"))
    layers = int(fact("block_count")) - int(fact("nextn_predict_layers", 0))
    dim, values = int(fact("attention.key_length", width // heads)), int(fact("ssm.time_step_rank"))
    every, listed = int(fact("full_attention_interval", 4)), fact("attention.recurrent_layers")
    recurrent = [
        bool(listed[i]) if listed is not None else (i + 1) % every != 0 for i in range(layers)
    ]
    scaled = fact("rope.scaling.type", "none") not in (None, "none")
    return {
        "model_type": "qwen3_5_text" if architecture == QWEN35_ARCHITECTURE else "qwen3_5_moe_text",
        "grouped": architecture == QWEN3_NEXT_ARCHITECTURE,
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": dim,
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "partial_rotary_factor": int(fact("rope.dimension_count", dim)) / dim,
        **({"rope_scaling": _rope_scaling_options(fact)} if scaled else {}),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_key_heads": int(fact("ssm.group_count")),
        "linear_num_value_heads": values,
        "linear_key_head_dim": int(fact("ssm.state_size")),
        "linear_value_head_dim": int(fact("ssm.inner_size")) // values,
        "num_experts": int(fact("expert_count", 0)),
        "num_experts_per_tok": int(fact("expert_used_count", 0)),
        "norm_topk_prob": True,
        "tie_word_embeddings": "output.weight" not in names,
    }


def _rope_scaling_options(fact: Callable[..., Any]) -> dict[str, Any]:
    """Return a scaled rotation."""
    scaling: dict[str, Any] = {
        "rope_type": str(fact("rope.scaling.type")),
        "factor": float(fact("rope.scaling.factor")),
    }
    trained = fact("rope.scaling.original_context_length")
    if trained is not None:
        scaling["original_max_position_embeddings"] = int(trained)
    return scaling


class DeltaNetGgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        index, _, part = name.removeprefix("model.layers.").partition(".")
        if part in LINEAR_ATTENTION_TENSORS:
            return f"blk.{index}.{LINEAR_ATTENTION_TENSORS[part]}"
        fused = f"blk.{index}.ffn_gate_up_exps.weight"
        is_half = ".experts." in part and part.split(".")[-2] in GATE_UP_CHUNK_INDEX
        return fused if is_half and fused in self._names else super().stored_tensor_name(name)

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        part = name.removeprefix("model.layers.").partition(".")[2]
        if part.startswith("linear_attn."):
            return self._read_recurrence_tensor(name, part.removeprefix("linear_attn."))
        if name.endswith("norm.weight"):
            return super().read_uncast_tensor(name) - 1
        tensor = super().read_uncast_tensor(name)
        if ".experts." in part and "ffn_gate_up_exps" in self.stored_tensor_name(name):
            return tensor.chunk(2)[GATE_UP_CHUNK_INDEX[part.split(".")[-2]]]
        return tensor

    def _read_recurrence_tensor(self, name: str, part: str) -> Tensor:
        """Return a recurrence's tensor."""
        if not self.has(name):  # Qwen3-Next's, from a matrix by head of keys
            return self._ungroup_projection(name, part)
        tensor = super().read_uncast_tensor(name)
        if part == "A_log":
            tensor = (-tensor.float()).log()
        if part == "norm.weight":
            return tensor
        if part == "conv1d.weight":
            tensor = tensor.reshape(len(tensor), 1, -1)
        if self._config["grouped"]:
            return tensor
        if part == "out_proj.weight":
            return self._group_by_key_head(tensor.T).T.contiguous()
        keys = 2 * self._config["linear_num_key_heads"] * self._config["linear_key_head_dim"]
        first = keys if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
        return torch.cat((tensor[:first], self._group_by_key_head(tensor[first:])))

    def _group_by_key_head(self, tensor: Tensor) -> Tensor:
        """Return rows by head of values so that those of one head of keys are beside each other."""
        keys, heads = (self._config[f"linear_num_{each}_heads"] for each in ("key", "value"))
        parts = tensor.chunk(heads)  # part p is of the head of keys p mod keys
        return torch.cat([parts[p] for key in range(keys) for p in range(key, heads, keys)])

    def _ungroup_projection(self, name: str, part: str) -> Tensor:
        """Return q, k and v, or z, b or a of all heads, each group's parts apart."""
        whole = "in_proj_ba" if part[len("in_proj_")] in "ab" else "in_proj_qkvz"
        own = part.removesuffix(".weight")
        matrix = super().read_uncast_tensor(name.replace(own, whole))
        keys, heads = (self._config[f"linear_num_{each}_heads"] for each in ("key", "value"))
        dim, width = (self._config[f"linear_{each}_head_dim"] for each in ("key", "value"))
        values = heads // keys * width
        sizes = [heads // keys] * 2 if whole == "in_proj_ba" else [dim, dim, values, values]
        pieces = [group.split(sizes) for group in matrix.chunk(keys)]
        chosen = {"in_proj_b": (0,), "in_proj_a": (1,), "in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)}
        return torch.cat([piece[i] for i in chosen[own] for piece in pieces])


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = dict.fromkeys(
    (QWEN3_NEXT_ARCHITECTURE, QWEN35_ARCHITECTURE, QWEN35_MOE_ARCHITECTURE),
    (delta_net_config, DeltaNetGgufSource),
)

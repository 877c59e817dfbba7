"""Reads GGUF containers raw: blk.N.* names, config from the metadata, q and k rows restored.

A GGUF file of architecture llama stores the rows of q and k so that interleaved RoPE fits: within a
head, row 2j holds channel j and row 2j+1 holds channel j + dim/2. Everything else keeps its values;
gpt2's projections are stored [out, in], where the original has [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import RawContainer, TensorSource
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

DECODER_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
DECODER_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FUSED_TOP = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
FUSED_LAYER = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.w1": "ffn_up",
    "mlp.w2": "ffn_gate",
    "mlp.c_proj": "ffn_down",
}
ARCHITECTURES = ("gpt2", "llama", "qwen", "qwen2", "qwen3")


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face name.

    Example: model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight.
    """
    stem, _, suffix = name.rpartition(".")
    for top, head, layer in (
        (DECODER_TOP_NAMES, "model.layers.", DECODER_LAYER_NAMES),
        (FUSED_TOP, "transformer.h.", FUSED_LAYER),
    ):
        if stem in top:
            return f"{top[stem]}.{suffix}"
        if stem.startswith(head):
            index, _, part = stem[len(head) :].partition(".")
            return f"blk.{index}.{layer[part]}.{suffix}"
    return name


class GgufSource(TensorSource):
    """A GGUF container under Hugging Face names and orientations."""

    def __init__(
        self,
        container: RawContainer,
        dtype: torch.dtype,
        config: Mapping[str, Any],
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(container, dtype, device=device)
        self._config = config

    def raw_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        return gguf_name(name)

    def stored_tensor(self, name: str) -> Tensor:
        """Return the tensor dequantized, in the file's layout."""
        tensor = super().stored_tensor(name)
        model_type = self._config["model_type"]
        if model_type == "llama" and ".self_attn.q_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_attention_heads"])
        if model_type == "llama" and ".self_attn.k_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_key_value_heads"])
        if model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
            return tensor.T
        return tensor


def undo_llama_qk_permutation(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's interleaved rows (channel j, j + d/2) to first half, second half."""
    per_head = rows.shape[0] // heads
    place = torch.arange(rows.shape[0]).reshape(heads, per_head)
    return rows[torch.cat((place[:, 0::2], place[:, 1::2]), dim=1).reshape(-1)]


def gguf_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys from GGUF metadata, as far as the reference reads it."""
    facts = container.metadata
    architecture = str(facts.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"GGUF architecture {architecture!r} has no reference; "
            f"known are {', '.join(ARCHITECTURES)}"
        )

    def fact(key: str, default: Any = None) -> Any:
        value = facts.get(f"{architecture}.{key}", default)
        if value is None:
            raise CorruptCheckpoint(
                f"GGUF metadata lacks {architecture}.{key}; convert the model again"
            )
        return value

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
    return config | {"rms_norm_eps": eps}


def gguf_rope(container: RawContainer, config: Mapping[str, Any]) -> ReferenceRope:
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

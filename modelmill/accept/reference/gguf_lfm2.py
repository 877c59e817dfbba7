"""The config and the tensors of LFM2's GGUFs, as llama.cpp's converter writes them, and experts'.

Layers without KV heads are convolutions, stored as matrices; the MLP's width is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from modelmill.accept.reference.gguf_metadata import make_metadata_reader
from modelmill.accept.reference.gguf_source import (
    HF_TO_GGUF_TENSORS_BY_MODEL_TYPE,
    GgufConfigReaderAndSource,
    GgufSource,
)
from modelmill.accept.reference.tensor_source import RawContainer

LFM2_ARCHITECTURE, LFM2_MOE_ARCHITECTURE = "lfm2", "lfm2moe"


def lfm2_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    fact, names = make_metadata_reader(container), container.names()
    kv_heads = [int(each) for each in fact("attention.head_count_kv")]
    return {
        "model_type": "lfm2",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": int(fact("embedding_length")),
        "num_hidden_layers": len(kv_heads),
        "num_attention_heads": int(fact("attention.head_count")),
        "num_key_value_heads": max(kv_heads),
        "head_dim": fact("attention.key_length"),
        "max_position_embeddings": int(fact("context_length")),
        "norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "layer_types": ["full_attention" if each else "conv" for each in kv_heads],
        "conv_bias": f"blk.{kv_heads.index(0)}.shortconv.conv.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }


def lfm2_moe_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of one with experts, whose weights sum to 1."""
    fact = make_metadata_reader(container)
    return lfm2_config(container) | {
        "model_type": "lfm2_moe",
        "num_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
        "num_dense_layers": int(fact("leading_dense_block_count", 0)),
    }


class Lfm2GgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        **HF_TO_GGUF_TENSORS_BY_MODEL_TYPE["lfm2"],
        "feed_forward.gate": "ffn_gate_inp",
    }

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().read_uncast_tensor(name)
        return tensor[:, None] if name.endswith(".conv.conv.weight") else tensor


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = {
    LFM2_ARCHITECTURE: (lfm2_config, Lfm2GgufSource),
    LFM2_MOE_ARCHITECTURE: (lfm2_moe_config, Lfm2GgufSource),
}

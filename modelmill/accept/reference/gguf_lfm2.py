"""The config and the tensors of LFM2's GGUFs, as llama.cpp's converter writes them.

Layers without KV heads are convolutions, stored as matrices; the MLP's width is stored as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

ARCHITECTURE = "lfm2"


def lfm2_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{ARCHITECTURE}.{key}", default)

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


class Lfm2GgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def stored_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().stored_tensor(name)
        return tensor[:, None] if name.endswith(".conv.conv.weight") else tensor


READERS = {ARCHITECTURE: (lfm2_config, Lfm2GgufSource)}

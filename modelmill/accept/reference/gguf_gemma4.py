"""The config and the tensors of Gemma 4's GGUF, as llama.cpp's converter leaves them.

Norms are stored as they are. The frequencies of layers with full attention are divided by
``rope_freqs.weight``, by a huge number where a pair of channels stands still.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

ARCHITECTURE = "gemma4"
ROPE_FREQS_TENSOR = "rope_freqs.weight"
MIN_UNROTATED_DIVISOR = 1e20
"""Channels whose divisor in ``rope_freqs`` is as large are not rotated."""
HF_TO_GGUF_TENSORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def gemma4_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{ARCHITECTURE}.{key}", default)

    layers = int(fact("block_count"))
    slides = [bool(each) for each in fact("attention.sliding_window_pattern")]
    shared = int(fact("attention.shared_kv_layers", 0))
    kv_heads = fact("attention.head_count_kv")
    heads = [int(kv_heads)] * layers if isinstance(kv_heads, int) else [int(n) for n in kv_heads]
    full = slides.index(False)
    divisors = container.get(ROPE_FREQS_TENSOR).float().flatten()
    rotation = {
        "rope_type": "proportional",
        "partial_rotary_factor": float((divisors < MIN_UNROTATED_DIVISOR).float().mean()),
        "rope_theta": float(fact("rope.freq_base")),
    }
    windowed = {"rope_type": "default", "rope_theta": float(fact("rope.freq_base_swa"))}
    sizes = {"head_dim": int(fact("attention.key_length")), "num_key_value_heads": heads[full]}
    return {
        "model_type": "gemma4_text",
        "hidden_size": int(fact("embedding_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": int(fact("attention.head_count")),
        "num_key_value_heads": heads[slides.index(True)] if any(slides) else heads[0],
        "head_dim": int(fact("attention.key_length_swa")),
        "per_layer_config": {str(index): sizes for index in range(layers) if not slides[index]},
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": int(fact("attention.sliding_window")),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(fact("context_length")),
        "rope_parameters": {"full_attention": rotation, "sliding_attention": windowed},
        "final_logit_softcapping": fact("final_logit_softcapping"),
        "hidden_size_per_layer_input": int(fact("embedding_length_per_layer_input", 0)),
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in names,
        "num_experts": fact("expert_count"),
        "top_k_experts": fact("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in names,
    }


class Gemma4GgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        index, _, part = name.removeprefix("model.layers.").partition(".")
        if part in HF_TO_GGUF_TENSORS:
            return f"blk.{index}.{HF_TO_GGUF_TENSORS[part]}"
        if ".experts." in name:
            matrix = part.rpartition(".")[0].rpartition(".")[2].removesuffix("_proj")
            both = f"blk.{index}.ffn_gate_up_exps.weight"
            fused = matrix != "down" and both in self._names
            return both if fused else f"blk.{index}.ffn_{matrix}_exps.weight"
        return super().stored_tensor_name(name)

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor dequantized; gate and up of an expert are the halves of one matrix."""
        tensor = super().read_uncast_tensor(name)
        if "gate_up_exps" not in self.stored_tensor_name(name):
            return tensor
        gate, up = tensor.chunk(2)
        return gate if ".gate_proj." in name else up

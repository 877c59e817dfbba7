"""The config and the tensors of Hunyuan's GGUFs, as llama.cpp's converter writes them.

The base of the rotation has ``alpha`` in it already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from modelmill.accept.reference.gguf_metadata import (
    add_rope_scaling,
    decoder_config,
    make_metadata_reader,
)
from modelmill.accept.reference.gguf_source import GgufConfigReaderAndSource, GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

HUNYUAN_DENSE_ARCHITECTURE, HUNYUAN_MOE_ARCHITECTURE, HY_V3_ARCHITECTURE = (
    "hunyuan-dense",
    "hunyuan-moe",
    "hy_v3",
)


def hunyuan_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of the dense one or of that with experts."""
    fact = make_metadata_reader(container)
    experts = int(fact("expert_count", 0))
    model_type = "hunyuan_v1_moe" if experts else "hunyuan_v1_dense"
    return add_rope_scaling(container, decoder_config(container, model_type)) | {
        "num_experts": experts,
        "num_experts_per_tok": int(fact("expert_used_count", 0)),
    }


def hy_v3_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of Hunyuan 3; which layers have experts follows from the tensors."""
    fact, names = make_metadata_reader(container), set(container.names())
    config = add_rope_scaling(container, decoder_config(container, "hy_v3"))
    layers = range(config["num_hidden_layers"])
    return config | {
        "num_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
        "router_scaling_factor": float(fact("expert_weights_scale", 1.0)),
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in names else "dense" for layer in layers
        ],
    }


class HunyuanGgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        "mlp.router.gate": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    }

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        if name.endswith(".mlp.expert_bias"):
            own = f"blk.{name.split('.')[2]}.exp_probs_b"
            return own if own in self._names else f"{own}.bias"
        return super().stored_tensor_name(name)


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = {
    HUNYUAN_DENSE_ARCHITECTURE: (hunyuan_config, HunyuanGgufSource),
    HUNYUAN_MOE_ARCHITECTURE: (hunyuan_config, HunyuanGgufSource),
    HY_V3_ARCHITECTURE: (hy_v3_config, HunyuanGgufSource),
}

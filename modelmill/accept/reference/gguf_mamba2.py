"""The config and the tensors of Mamba2's GGUF, as llama.cpp's converter leaves them.

It stores A = −exp(A_log) and D as columns, the weight of the gated norm by group, and the
convolution as a matrix.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

ARCHITECTURE = "mamba2"
TOP = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
MODULES = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
WHOLE = {"mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias"}


def mamba2_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    facts, names = container.metadata, container.names()
    heads, inner = (
        int(facts[f"{ARCHITECTURE}.ssm.{key}"]) for key in ("time_step_rank", "inner_size")
    )
    return {
        "model_type": "mamba2",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": int(facts[f"{ARCHITECTURE}.embedding_length"]),
        "num_hidden_layers": int(facts[f"{ARCHITECTURE}.block_count"]),
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": int(facts[f"{ARCHITECTURE}.ssm.state_size"]),
        "n_groups": int(facts[f"{ARCHITECTURE}.ssm.group_count"]),
        "layer_norm_epsilon": float(facts[f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"]),
        "use_bias": "blk.0.ssm_in.bias" in names,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }


class Mamba2GgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def raw_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        stem, _, suffix = name.rpartition(".")
        if stem in TOP:
            return f"{TOP[stem]}.{suffix}"
        index, _, part = name.removeprefix("backbone.layers.").partition(".")
        if part in WHOLE:
            return f"blk.{index}.{WHOLE[part]}"
        module = MODULES.get(part.rpartition(".")[0])
        return name if module is None else f"blk.{index}.{module}.{suffix}"

    def stored_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().stored_tensor(name)
        if name.endswith(".A_log"):
            return (-tensor.float()).log().flatten()
        if name.endswith((".D", ".mixer.norm.weight")):
            return tensor.flatten()
        return tensor[:, None] if name.endswith(".conv1d.weight") else tensor

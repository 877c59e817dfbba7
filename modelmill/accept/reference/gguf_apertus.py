"""The config and the tensors of Apertus's GGUFs, as llama.cpp's converter writes them.

The four numbers of xIELU are metadata, one for each layer. A scaled rotation is one divisor for
each frequency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelmill.accept.reference.gguf_metadata import (
    decoder_config,
    make_metadata_reader,
    rope_scaling_options,
)
from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

ARCHITECTURE = "apertus"


def apertus_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    config = decoder_config(container, "apertus")
    theta, scaling = config["rope_theta"], rope_scaling_options(make_metadata_reader(container))
    return config | {"rope_parameters": {"rope_theta": theta, **scaling}}


class ApertusGgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        "attention_layernorm": "attn_norm",
        "feedforward_layernorm": "ffn_norm",
    }

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor, or a number of the activation."""
        stem, is_slope, slope = name.partition(".mlp.act_fn.")
        if not is_slope:
            return super().read_uncast_tensor(name)
        stored = self.container.metadata[f"xielu.{slope}"]
        value = stored if isinstance(stored, float) else stored[int(stem.rpartition(".")[2])]
        return torch.tensor(float(value))


CONFIG_READERS_AND_SOURCES = {ARCHITECTURE: (apertus_config, ApertusGgufSource)}

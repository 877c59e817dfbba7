"""GPT-2, small to XL: learned positions, LayerNorm, tied head, weights stored as [in, out].

Also Cerebras-GPT, whose activation is exact, and Stanford's GPT-2, which divides the scores of each
layer by its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import (
    ALL_BIASES_ENABLED,
    positive_int,
    read_activation,
    read_boolean,
)
from modelmill.nn.attention import AttentionSpec
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = replace(_gpt2_common.GPT2_LAYOUT, transposed=True)  # Conv1D stores [in, out]
UNUSED_CONFIG_KEYS = ("reorder_and_upcast_attn", "n_special", "predict_special_tokens")


@dataclass(frozen=True)
class InverseLayerIndexScaleConfig(DecoderConfig):
    """A decoder whose scores are divided by the layer's number, from 1 up, besides."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The attention of layer ``layer``."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        spec = super().attention_spec(layer)
        assert isinstance(spec, AttentionSpec), "GPT-2 has the usual attention"
        return replace(spec, scale=scale / (layer + 1))


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Convert a Hugging Face config.json."""
    length = positive_int(raw, "n_ctx", default=1024)  # where the others are silent
    config = _gpt2_common.config_from_hf(
        raw,
        inner=("n_inner",),
        max_len=positive_int(raw, "n_positions", "max_position_embeddings", default=length),
        first_position_row=0,
        activation=read_activation(raw, "activation_function", "gelu_new"),
        attention_scale=None if read_boolean(raw, "scale_attn_weights", True) else 1.0,
        **ALL_BIASES_ENABLED,
    )
    if not read_boolean(raw, "scale_attn_by_inverse_layer_idx", False):
        return config
    return InverseLayerIndexScaleConfig(**vars(config))

"""GPT-2, small to XL: learned positions, LayerNorm, tied head, weights stored as [in, out]."""

from __future__ import annotations

from modelmill.core.config_view import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import EVERY_BIAS, exact_quotient, positive_int, require_value
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
# Conv1D stores [in, out]; the buffers are causal masks
LAYOUT = CheckpointLayout(
    **_gpt2_common.OUTSIDE_NAMES,
    positions="transformer.wpe",
    names={**_gpt2_common.LAYER_NAMES, "mlp.fc_proj": ("mlp.c_fc",)},
    transposed=True,
    ignored=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
)
UNUSED_CONFIG_KEYS = ("reorder_and_upcast_attn", "n_special", "predict_special_tokens")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Convert a Hugging Face config.json."""
    require_value(raw, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    require_value(raw, "scale_attn_weights", (True,), True)
    require_value(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    require_value(raw, "add_cross_attention", (False,), False)
    hidden, heads = (
        positive_int(raw, "n_embd", "hidden_size"),
        positive_int(raw, "n_head", "num_attention_heads"),
    )
    exact_quotient("n_embd", hidden, "n_head", heads)
    length = positive_int(raw, "n_ctx", default=1024)  # where the others are silent
    return _gpt2_common.config_from_hf(
        raw,
        inner=("n_inner",),
        max_len=positive_int(raw, "n_positions", "max_position_embeddings", default=length),
        first_position_row=0,
        activation="gelu_tanh",
        **EVERY_BIAS,
    )

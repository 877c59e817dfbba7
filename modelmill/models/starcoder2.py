"""StarCoder2: LayerNorm, a plain MLP, biases everywhere, one sliding window for all layers."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import linear_bias_fields
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, "mlp.fc_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)}
)
SUPPORTED_VALUES = {"norm_type": ("layer_norm",), "mlp_type": ("default",)}
# second names among them, which transformers does not read
UNUSED_CONFIG_KEYS = ("residual_dropout", "activation_function", "layer_norm_epsilon")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Starcoder2Config."""
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=2, positions=4096, tied=True, activation="gelu_pytorch_tanh"),
        layer_norm="norm_epsilon",
        gated=False,
        **linear_bias_fields(raw, "use_bias", True),
    )
    return _llama_common.with_sliding_window(raw, config)

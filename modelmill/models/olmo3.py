"""OLMo 3: OLMo 2 with windows; scaled positions in layers with full attention only."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common, olmo2
from modelmill.models._hf_config import num_layers
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = olmo2.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Olmo3Config."""
    layers = num_layers(raw, "num_hidden_layers")
    full, local = _llama_common.full_and_local_rope_configs(raw, 500000.0, 500000.0)
    config = olmo2.config_from_hf(full)
    windows = _llama_common.windows_with_full_every_nth_layer(raw, layers)
    return replace(config, windows=windows, local_rope=olmo2.config_from_hf(local).rope)

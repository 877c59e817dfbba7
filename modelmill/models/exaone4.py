"""EXAONE 4: norms behind the branches, Qwen3's norms of q and k, windows that alone rotate."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import num_layers
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.models.olmo2 import POST_NORM_CHECKPOINT_NAMES
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.post_norm import PostNormLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(POST_NORM_CHECKPOINT_NAMES)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Exaone4Config.

    Without any window all layers rotate; with windows, only the layers that have one.
    """
    layers = num_layers(raw, "num_hidden_layers")
    raw = with_config_defaults(raw, {"num_key_value_heads": 32, "sliding_window": 4096})
    sized = raw["sliding_window"] is not None
    windows: tuple[int | None, ...] = ()
    if sized:
        windows = _llama_common.windows_with_full_every_nth_layer(raw, layers, has_pattern=True)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(eps=1e-5, activation="silu"),
        layer=PostNormLayer,
        qk_norm=True,
        windows=windows,
        unrotated_layers=frozenset(i for i, size in enumerate(windows) if size is None),
    )

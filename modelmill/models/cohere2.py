"""Command R7B and Command A (``Cohere2ForCausalLM``): parallel layers, windows that rotate.

Layers with a window rotate neighbouring channels; layers with full attention rotate nothing.
"""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, num_layers, positive_float
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM_WITHOUT_BIAS
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)
SUPPORTED_VALUES = {
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_qk_norm": (False,),
    "order_of_interleaved_layers": ("local_attn_first",),
}
UNUSED_CONFIG_KEYS = (
    "cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "layer_switch",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Cohere2Config."""
    layers = num_layers(raw, "num_hidden_layers")
    windows = _llama_common.windows_with_full_every_nth_layer(raw, layers, has_pattern=True)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=8192, tied=True, activation="silu"),
        layer_norm="layer_norm_eps",
        norm=LAYER_NORM_WITHOUT_BIAS,
        layer=ParallelResidualLayer,
        **attention_bias_fields(raw),
        logit_scale=positive_float(raw, "logit_scale", default=0.0625),
        windows=windows,
        unrotated_layers=frozenset(i for i in range(layers) if windows[i] is None),
    )

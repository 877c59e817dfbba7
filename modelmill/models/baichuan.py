"""Baichuan and Baichuan 2: LLaMA with q, k and v in one matrix; Baichuan 2 norms the head.

The 13B models, whose config.json has no ``max_position_embeddings``, have ALiBi in the place of the
rotation. A ``z_loss_weight`` is what tells a Baichuan 2 by, or its vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import MAX_CONFIG_INTEGER, positive_int, require_supported_value
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "attn.qkv_proj": ("self_attn.W_pack",)})
UNUSED_CONFIG_KEYS = ("model_max_length", "_from_model_config")
BAICHUAN2_VOCAB = 125696


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BaichuanConfig."""
    loss = raw.get("z_loss_weight")
    normed = loss is not None or raw.get("vocab_size") == BAICHUAN2_VOCAB
    config = _llama_common.config_from_hf(raw, ConfigDefaults(positions=4096), normed_head=normed)
    if raw.get("max_position_embeddings") is not None:
        return config
    for key in ("rope_scaling", "rope_theta"):  # a 7B that lost its key would be computed wrongly
        require_supported_value(raw, key, (None,), None)
    longest = positive_int(raw, "model_max_length", default=4096)
    return replace(
        config, rope=None, alibi=AlibiConfig(), max_len=longest, max_extended_len=MAX_CONFIG_INTEGER
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model; in GGUFs q, k and v are apart."""
    out = []
    for rule in CHECKPOINT_LAYOUT.rename_rules(config):
        stem, pack, leaf = rule.sources[0].partition("W_pack.")
        apart = tuple(f"{stem}{part}_proj.{leaf}" for part in "qkv") if pack else ()
        out.append(replace(rule, apart=apart))
    return out

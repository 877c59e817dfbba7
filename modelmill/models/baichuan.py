"""Baichuan and Baichuan 2, 7B: LLaMA with q, k and v in one matrix; Baichuan 2 norms the head.

The 13B models, whose config.json has no ``max_position_embeddings``, add ALiBi to the scores; they
are refused. A ``z_loss_weight`` is what tells a Baichuan 2 by, or its vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.models import _llama_common
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, CHECKPOINT_PREFIXES
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]

LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "attn.qkv_proj": ("self_attn.W_pack",)})
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
UNUSED_CONFIG_KEYS = ("auto_map", "model_max_length", "_from_model_config")
BAICHUAN2_VOCAB = 125696


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BaichuanConfig."""
    if raw.get("max_position_embeddings") is None:
        raise CheckpointError(
            "config.json: max_position_embeddings is missing: this is a Baichuan 13B, whose ALiBi "
            "is not computed; a 7B has it"
        )
    loss = raw.get("z_loss_weight")
    normed = loss is not None or raw.get("vocab_size") == BAICHUAN2_VOCAB
    return _llama_common.config_from_hf(raw, positions=4096, normed_head=normed)


class Model(Decoder):
    """The plain decoder."""

"""DiffLlama: LLaMA with differential attention (arXiv:2410.05258)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "attn.difference": ("self_attn",)})
UNUSED_CONFIG_KEYS = ("lambda_std_dev",)  # of training


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in DiffLlamaConfig.

    Raises:
        CheckpointError: for KV heads that form no pairs.
    """
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(eps=1e-5, activation="silu"),
        **attention_bias_fields(raw),
        differential=True,
    )
    if config.kv_heads % 2:
        raise CheckpointError(
            f"config.json: num_key_value_heads={config.kv_heads} is odd; differential attention "
            "needs pairs"
        )
    return config


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model; heads i and i + n / 2 stand side by side."""
    step = f"+rows:{'/'.join(_head_pair_row_ranges(config))}"
    return [
        replace(rule, how=f"{rule.how}{step}") if ".attn.qkv_proj." in rule.target else rule
        for rule in CHECKPOINT_LAYOUT.rename_rules(config)
    ]


def _head_pair_row_ranges(config: DecoderConfig) -> list[str]:
    """The rows of q, k and v, pair by pair, and their number."""
    first, dim, ranges = 0, config.head_dim, []
    for heads in (config.heads, config.kv_heads, config.kv_heads):
        for pair in range(heads // 2):
            starts = (first + (pair + half) * dim for half in (0, heads // 2))
            ranges += [f"{start}-{start + dim}" for start in starts]
        first += heads * dim
    return [*ranges, str(first)]

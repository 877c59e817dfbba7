"""What Qwen3-Next and Qwen3.5 have in common: their recurrence, layer types, and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _hybrid_config, _llama_common
from modelmill.models._hf_config import attention_bias_fields, exact_quotient, positive_int
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import IGNORED_BUFFERS, CheckpointLayout
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.gated_delta_net import GatedDeltaNetSpec

MAX_HEAD_DIM, MAX_CONV_WIDTH = 1024, 64
DELTA_NET_NAMES = {
    **CHECKPOINT_NAMES,
    "attn.gate_proj": ("self_attn.q_proj",),
    "attn.in_proj": ("linear_attn.in_proj_qkvz",),
    "attn.rates": ("linear_attn.in_proj_ba",),
    "attn.conv": ("linear_attn.conv1d",),
    "attn.delta_rule": ("linear_attn",),
    "attn.gated_norm": ("linear_attn.norm",),
    "attn.out_proj": ("linear_attn.out_proj",),
}
# where q, k, v and z, and b and a, are matrices of their own
QWEN35_DELTA_NET_NAMES = {
    **DELTA_NET_NAMES,
    "attn.in_proj": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "attn.rates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
CHECKPOINT_LAYOUT = CheckpointLayout(
    QWEN35_DELTA_NET_NAMES,
    norms_less_one=True,
    whole_norms=frozenset(("attn.gated_norm",)),
    ignored=(*IGNORED_BUFFERS, r"mtp\..*"),  # heads for speculative decoding, which are not used
)
# of the drafting heads, and of the dtype of a state, which is float32 here whatever it says
QWEN35_INEFFECTIVE_KEYS = (
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype",
)  # fmt: skip
GATED_ATTENTION_ALLOWED_VALUES = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}
MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def without_mrope_keys(raw: RawConfig) -> Mapping[str, Any]:
    """The config without how positions in images are divided: those of text are alike in all."""
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return raw
    text = {key: value for key, value in parameters.items() if key not in MROPE_KEYS}
    return with_config_overrides(raw, {"rope_parameters": text})


def config_from_hf(raw: RawConfig, *, kv_heads: int) -> DecoderConfig:
    """The sizes of a hybrid of Gated DeltaNet and gated attention, without experts.

    Args:
        raw: The config.
        kv_heads: ``num_key_value_heads`` where config.json is silent.
    """
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=kv_heads, head_dim=256, positions=32768),
        partial=0.25,
        **attention_bias_fields(raw),
        qk_norm=True,
        output_gate=True,
    )
    return replace(
        config,
        recurrence=gated_delta_net_spec(raw, config.hidden, config.eps),
        recurrent_layers=recurrent_layers(raw, config.layers),
    )


def gated_delta_net_spec(raw: RawConfig, hidden: int, eps: float) -> GatedDeltaNetSpec:
    """The recurrence, from the keys that begin with ``linear_``.

    Raises:
        CheckpointError: for heads that cannot share keys.
    """
    key_heads = positive_int(raw, "linear_num_key_heads", default=16)
    heads = positive_int(raw, "linear_num_value_heads", default=32)
    exact_quotient("linear_num_value_heads", heads, "linear_num_key_heads", key_heads)
    key_dim, value_dim = (
        positive_int(raw, f"linear_{name}_head_dim", default=128, max_value=MAX_HEAD_DIM)
        for name in ("key", "value")
    )
    width = positive_int(raw, "linear_conv_kernel_dim", default=4, max_value=MAX_CONV_WIDTH)
    if width < 2:
        raise CheckpointError(
            f"config.json: linear_conv_kernel_dim must be at least 2, not {width}; a convolution "
            "over one token keeps no state"
        )
    return GatedDeltaNetSpec(hidden, key_heads, heads, key_dim, value_dim, width, eps)


def recurrent_layers(raw: RawConfig, layers: int) -> frozenset[int]:
    """The layers with a recurrence, from ``layer_types`` or every but the n-th.

    Raises:
        CheckpointError: for other layer types, a list of another length, and a list and an
            interval that contradict each other.
    """
    types = raw.get("layer_types")
    every = positive_int(raw, "full_attention_interval", default=4)
    by_interval = frozenset(layer for layer in range(layers) if (layer + 1) % every)
    if types is None:
        return by_interval
    listed = _hybrid_config.recurrent_layers(types, layers)
    if raw.get("full_attention_interval") is not None and listed != by_interval:
        layer = min(listed ^ by_interval)
        raise CheckpointError(
            f"config.json: full_attention_interval={every} contradicts layer_types, which names "
            f"layer {layer} {types[layer]}; remove one of them"
        )
    return listed

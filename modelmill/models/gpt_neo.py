"""GPT-Neo and TinyStories (``GPTNeoForCausalLM``): GPT-2 with windows, scores without a factor."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import MAX_LAYERS, positive_int, read_activation
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
GLOBAL_ATTENTION, LOCAL_ATTENTION = "global", "local"
CHECKPOINT_LAYOUT = CheckpointLayout(
    **_gpt2_common.NON_LAYER_NAMES,
    positions="transformer.wpe",
    names={
        **_gpt2_common.GPT2_LAYER_NAMES,
        "attn.qkv_proj": tuple(f"attn.attention.{each}_proj" for each in "qkv"),
        "attn.o_proj": ("attn.attention.out_proj",),
        "mlp.fc_proj": ("mlp.c_fc",),
    },
    ignored=(r".*\.attn\.attention\.(masked_)?bias",),  # causal masks
)
UNUSED_CONFIG_KEYS = ("embed_dropout",)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GPTNeoConfig."""
    config = _gpt2_common.config_from_hf(
        raw,
        hidden=("hidden_size",),
        heads=("num_heads", "num_attention_heads"),
        layers=("num_layers", "num_hidden_layers"),
        inner=("intermediate_size",),
        max_len=positive_int(raw, "max_position_embeddings", default=2048),
        first_position_row=0,
        attention_scale=1.0,
        activation=read_activation(raw, "activation_function", "gelu_new"),
        out_bias=True,
        mlp_bias=True,
    )
    size = positive_int(raw, "window_size", default=256)
    types = _layer_types(raw, config.layers)
    return replace(
        config, windows=tuple(size if each == LOCAL_ATTENTION else None for each in types)
    )


def _layer_types(raw: RawConfig, layers: int) -> list[str]:
    """``attention_types``, pairs of types and how often they repeat, for each layer.

    Raises:
        CheckpointError: for other types or layers, or another ``attention_layers`` beside it.
    """
    pairs = raw.get("attention_types", [[[GLOBAL_ATTENTION, LOCAL_ATTENTION], 12]])
    try:
        types = [each for names, count in pairs for each in min(count, MAX_LAYERS) * names]
    except (TypeError, ValueError):
        types = []
    if len(types) != layers or not {GLOBAL_ATTENTION, LOCAL_ATTENTION}.issuperset(map(str, types)):
        raise CheckpointError(
            f"config.json: attention_types must name {GLOBAL_ATTENTION} or {LOCAL_ATTENTION} "
            f"for each of num_layers={layers} layers, as [[types, repetitions], …], "
            f"not {quote(pairs, 60)}"
        )
    if raw.get("attention_layers", types) != types:
        raise CheckpointError(
            "config.json: attention_layers and attention_types contradict each other"
        )
    return types

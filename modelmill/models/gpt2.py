"""GPT-2, small to XL: learned positions, LayerNorm, tied head, weights stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.models import _transformer_h_names
from modelmill.models._hf_config import (
    boolean,
    non_negative_float,
    num_layers,
    positive_int,
    require_value,
)
from modelmill.models._layer_rules import head_rules, stacked_rules
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM

CHECKPOINT_PREFIXES = _transformer_h_names.PREFIXES
CHECKPOINT_NAMES = {**_transformer_h_names.LAYER_NAMES, "mlp.fc_proj": ("mlp.c_fc",)}
UNUSED_CONFIG_KEYS = ("reorder_and_upcast_attn", "n_special", "predict_special_tokens")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Convert a Hugging Face config.json."""
    require_value(raw, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    require_value(raw, "scale_attn_weights", (True,), True)
    require_value(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    require_value(raw, "add_cross_attention", (False,), False)
    hidden, heads = (
        positive_int(raw, "n_embd", "hidden_size"),
        positive_int(raw, "n_head", "num_attention_heads"),
    )
    if hidden % heads:
        raise CheckpointError(f"config.json: n_embd={hidden} is not a multiple of n_head={heads}")
    return DecoderConfig(
        hidden=hidden,
        inner=positive_int(raw, "n_inner", default=4 * hidden),
        layers=num_layers(raw, "n_layer", "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=positive_int(raw, "vocab_size"),
        eps=non_negative_float(raw, "layer_norm_epsilon", default=1e-5),
        # n_ctx only fills in for the others
        max_len=positive_int(
            raw,
            "n_positions",
            "max_position_embeddings",
            default=positive_int(raw, "n_ctx", default=1024),
        ),
        rope=None,
        first_position_row=0,
        norm=LAYER_NORM,
        gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=boolean(raw, "tie_word_embeddings", True),
    )


def rules(config: DecoderConfig) -> list[Rule]:
    """Conv1D stores [in, out]: transposed here, once."""
    out = [
        Rule("embed.weight", ("transformer.wte.weight",)),
        Rule("embed.positions", ("transformer.wpe.weight",)),
        *_affine("norm", "transformer.ln_f"),
        *head_rules(tied=config.tied),
    ]
    specs = map(config.layer_spec, range(config.layers))
    return out + stacked_rules(
        specs, CHECKPOINT_NAMES, _transformer_h_names.LAYERS, transposed=True
    )


def ignored_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """The causal mask buffers, and the copy of a tied head."""
    masks = (r".*\.attn\.bias", r".*\.attn\.masked_bias")
    return (*masks, r"lm_head\.weight") if config.tied else masks


def _affine(target: str, source: str) -> list[Rule]:
    return [
        Rule(f"{target}.weight", (f"{source}.weight",)),
        Rule(f"{target}.bias", (f"{source}.bias",)),
    ]


class Model(Decoder):
    """The decoder with learned positions."""

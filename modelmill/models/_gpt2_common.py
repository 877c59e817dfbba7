"""Sizes and tensor names that GPT-2 and families that began as it have in common."""

from __future__ import annotations

from typing import Any

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import (
    MAX_CONFIG_INTEGER,
    exact_quotient,
    first_set_key,
    non_negative_float,
    num_layers,
    positive_int,
    read_boolean,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.norm import LAYER_NORM

NON_LAYER_NAMES: dict[str, Any] = {
    "layers": "transformer.h",
    "embed": "transformer.wte",
    "norm": "transformer.ln_f",
}
"""The checkpoint's names outside of layers, as ``CheckpointLayout`` takes them."""
GPT2_LAYER_NAMES = {
    "attn_norm": ("ln_1",),
    "attn.qkv_proj": ("attn.c_attn",),
    "attn.o_proj": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.down_proj": ("mlp.c_proj",),
}
"""Module of a layer → its names in the checkpoint."""
GPT2_LAYOUT = CheckpointLayout(
    **NON_LAYER_NAMES,
    positions="transformer.wpe",
    names={**GPT2_LAYER_NAMES, "mlp.fc_proj": ("mlp.c_fc",)},
    ignored=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),  # causal masks
)
"""Of GPT-2 and what is made like it, with matrices [out, in]."""


def config_from_hf(
    raw: RawConfig,
    *,
    max_len: int,
    hidden: tuple[str, ...] = ("n_embd", "hidden_size"),
    heads: tuple[str, ...] = ("n_head", "num_attention_heads"),
    layers: tuple[str, ...] = ("n_layer", "num_hidden_layers"),
    inner: tuple[str, ...] = (),
    eps: float | None = None,
    tied: bool = True,
    **switches: Any,
) -> DecoderConfig:
    """A decoder with LayerNorm, a plain MLP, as many KV heads as heads, and no rotation.

    Args:
        raw: The config.
        max_len: The longest sequence.
        hidden: The names of the width's key; likewise ``heads``, ``layers`` and ``inner``.
        heads: The number of heads.
        layers: The number of layers.
        inner: The MLP's width, which is four times ``hidden`` where config.json is silent, and
            where the family has no such key.
        eps: The norms' epsilon; None: ``layer_norm_epsilon``, or 1e-5.
        tied: ``tie_word_embeddings`` where config.json is silent.
        switches: Further fields of DecoderConfig; with ``alibi`` sequences may be of any length.
    """
    width, count = positive_int(raw, *hidden), positive_int(raw, *heads)
    if eps is None:
        eps = non_negative_float(raw, "layer_norm_epsilon", default=1e-5)
    if "alibi" in switches:
        switches["max_extended_len"] = MAX_CONFIG_INTEGER
    fields = {"rope": None, "norm": LAYER_NORM, "gated": False, **switches}
    return DecoderConfig(
        hidden=width,
        inner=positive_int(raw, *inner, default=4 * width) if inner else 4 * width,
        layers=num_layers(raw, *layers),
        heads=count,
        kv_heads=count,
        head_dim=exact_quotient(
            first_set_key(raw, hidden), width, first_set_key(raw, heads), count
        ),
        vocab=positive_int(raw, "vocab_size"),
        eps=eps,
        max_len=max_len,
        tied=read_boolean(raw, "tie_word_embeddings", tied),
        **fields,
    )

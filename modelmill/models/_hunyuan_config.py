"""What Hunyuan's dense models and its mixtures have in common."""

from __future__ import annotations

from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    config_object,
    default_head_dim,
    positive_float,
    positive_int,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.nn.decoder import DecoderConfig

HUNYUAN_NAMES = {
    **CHECKPOINT_NAMES,
    "attn.rope_cache.q_norm": ("self_attn.query_layernorm",),
    "attn.rope_cache.k_norm": ("self_attn.key_layernorm",),
}
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,), "use_cla": (False,), "use_rotary_pos_emb": (True,),
    "mlp_bias": (False,), "norm_type": ("rms",), "position_embedding_xdrope": (False,),
    "add_classification_head": (False,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = (
    "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id",
    "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "skip_cls_token",
    "text_end_id", "text_start_id",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HunYuanDenseV1Config."""
    return _llama_common.config_from_hf(
        with_head_size(_fold_rope_alpha_into_base(raw)),
        ConfigDefaults(eps=1e-5, activation="silu"),
        **attention_bias_fields(raw),
        qk_norm=True,
        rotates_first=True,
    )


def with_head_size(raw: RawConfig) -> RawConfig:
    """The config with ``head_dim``, which some files call ``attention_head_dim`` as well."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    named = any(raw.get(key) is not None for key in ("head_dim", "attention_head_dim"))
    default = None if named else default_head_dim(hidden, heads)
    dim = positive_int(raw, "head_dim", "attention_head_dim", default=default)
    return with_config_overrides(raw, {"head_dim": dim})


def _fold_rope_alpha_into_base(raw: RawConfig) -> RawConfig:
    """The config without ``alpha``, a factor of the rotation's base that no length changes.

    Files call this scaling "dynamic"; its other numbers have no effect beside ``alpha``.

    Raises:
        CheckpointError: for an ``alpha`` of a scaling of another type.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = config_object(key, raw.get(key))
    if not scaling.get("alpha"):
        plain = {name: value for name, value in scaling.items() if name != "alpha"}
        return with_config_overrides(raw, {key: plain})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "dynamic":
        raise CheckpointError(
            f"config.json: {key}.alpha is of the type 'dynamic', not {quote(kind, 60)}; remove it"
        )
    dim = positive_int(with_head_size(raw), "head_dim")
    named = raw if scaling.get("rope_theta") is None else scaling
    base = positive_float(named, "rope_theta", default=10000.0)
    base *= positive_float(scaling, "alpha") ** (dim / max(dim - 2, 1))
    return with_config_overrides(raw, {key: {"rope_type": "default", "rope_theta": base}})

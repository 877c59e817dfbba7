"""Sizes and tensor names that LLaMA, Mistral, the Qwens and many others have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models._hf_config import (
    ORIGINAL_MAX_POSITION_KEY,
    config_object,
    exact_quotient,
    non_negative_float,
    num_layers,
    positive_int,
    read_activation,
    read_boolean,
    require_supported_value,
    rope_spec,
    scaled_rope_max_len,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.norm import LAYER_NORM

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
CHECKPOINT_NAMES = {
    "attn_norm": ("input_layernorm",),
    "attn.rope_cache.q_norm": ("self_attn.q_norm",),
    "attn.rope_cache.k_norm": ("self_attn.k_norm",),
    "attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o_proj": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
DEFAULT_SLIDING_WINDOW = 4096
"""``sliding_window`` of MistralConfig, Qwen2Config and Qwen3Config where config.json does not name
it.
"""


@dataclass(frozen=True)
class ConfigDefaults:
    """Values of a family's original configuration class, which hold where config.json is silent.

    Attributes:
        kv_heads: ``num_key_value_heads``; None: as many as heads.
        head_dim: None: hidden_size / heads.
        positions: ``max_position_embeddings``.
        eps: ``rms_norm_eps``; None: 1e-6, or 1e-5 of LayerNorm.
        tied: ``tie_word_embeddings``.
        theta: ``rope_theta``.
        activation: ``hidden_act`` of a family that may have any; None: SiLU alone is accepted.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 2048
    eps: float | None = None
    tied: bool = False
    theta: float = 10000.0
    activation: str | None = None


def config_from_hf(
    raw: RawConfig,
    defaults: ConfigDefaults = ConfigDefaults(),
    *,
    layer_norm: str | None = None,
    partial: float | None = None,
    rope_options: Mapping[str, Any] | None = None,
    **switches: Any,
) -> DecoderConfig:
    """The decoder's sizes from a config.json.

    Args:
        raw: The config.
        defaults: What holds where it is silent.
        layer_norm: Of a family with LayerNorm the key of its epsilon.
        partial: As in ``rope_spec``.
        rope_options: Further arguments of ``rope_spec``.
        switches: Further fields of DecoderConfig; ``activation`` among them is not read here.
    """
    if defaults.activation is not None:
        switches["activation"] = read_activation(raw, "hidden_act", defaults.activation)
    elif "activation" not in switches:
        require_supported_value(raw, "hidden_act", ("silu", "swish"), "silu")
    eps_key, eps = "rms_norm_eps", 1e-6
    if layer_norm is not None:
        eps_key, eps = layer_norm, 1e-5
        switches = {"norm": LAYER_NORM, **switches}
    sizes = {"num_key_value_heads": defaults.kv_heads, "head_dim": defaults.head_dim}
    raw = with_config_defaults(raw, {key: size for key, size in sizes.items() if size is not None})
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    kv_heads = positive_int(raw, "num_key_value_heads", default=heads)
    head_dim = positive_int(raw, "head_dim", default=max(hidden // heads, 1))
    exact_quotient("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if head_dim % 2:
        named = f"head_dim={head_dim} is odd"
        if raw.get("head_dim") is None:
            named = (
                f"hidden_size={hidden} of num_attention_heads={heads} heads makes {head_dim} of "
                "each, an odd number"
            )
        raise CheckpointError(f"config.json: {named}; rotary embeddings need pairs")
    positions = positive_int(raw, "max_position_embeddings", default=defaults.positions)
    spec = rope_spec(
        raw, head_dim, positions, theta=defaults.theta, partial=partial, **(rope_options or {})
    )
    return DecoderConfig(
        hidden=hidden,
        inner=positive_int(raw, "intermediate_size"),
        layers=num_layers(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=positive_int(raw, "vocab_size"),
        eps=non_negative_float(raw, eps_key, default=eps if defaults.eps is None else defaults.eps),
        max_len=scaled_rope_max_len(spec, positions),
        rope=spec,
        tied=read_boolean(raw, "tie_word_embeddings", defaults.tied),
        **switches,
    )


def sliding_windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window or None, from ``layer_types`` or Qwen2's ``max_window_layers``.

    A ``sliding_window`` of null means none; an absent one means DEFAULT_SLIDING_WINDOW, as in the
    original classes.

    Raises:
        CheckpointError: for a layer type that is not computed, and for windows without a size.
    """
    raw = with_config_defaults(raw, {"sliding_window": DEFAULT_SLIDING_WINDOW})
    sized = raw["sliding_window"] is not None
    on = read_boolean(raw, "use_sliding_window", True) and sized
    types, first = layer_types(raw, layers), raw.get("max_window_layers")
    if not on:
        refuse_sliding_layer_types(types)
        return ()
    size = positive_int(raw, "sliding_window")
    if types is not None:
        return tuple(size if layer_type == SLIDING_ATTENTION else None for layer_type in types)
    first = non_negative_float(raw, "max_window_layers", default=0)
    return tuple(size if layer >= first else None for layer in range(layers))


def refuse_sliding_layer_types(types: list[str] | None) -> None:
    """Refuse ``layer_types`` with windows where another key says that there are none.

    Raises:
        CheckpointError: for a list that names SLIDING_ATTENTION.
    """
    if types is not None and SLIDING_ATTENTION in types:
        raise CheckpointError(
            f"config.json: layer_types names {SLIDING_ATTENTION}, but sliding_window or "
            "use_sliding_window is off"
        )


def with_sliding_window(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """Return the config with ``sliding_window``, if it is set, in every layer."""
    if raw.get("sliding_window") is None:
        return config
    size = positive_int(raw, "sliding_window")
    return replace(config, windows=(size,) * config.layers)


def windows_with_full_every_nth_layer(
    raw: RawConfig, layers: int, every: int = 4, *, has_pattern: bool = False
) -> tuple[int | None, ...]:
    """Per layer the window or None, of families that have full attention in every n-th layer.

    Args:
        raw: The config; ``layer_types`` names the layers.
        layers: How many there are.
        every: n, where the config has no ``layer_types``.
        has_pattern: Whether the family has a ``sliding_window_pattern`` that says n.
    """
    raw = with_config_defaults(raw, {"sliding_window": DEFAULT_SLIDING_WINDOW})
    size, types = positive_int(raw, "sliding_window"), layer_types(raw, layers)
    pattern = raw.get("sliding_window_pattern") if has_pattern else None
    if types is not None:
        return tuple(size if each == SLIDING_ATTENTION else None for each in types)
    if pattern is not None:
        every = positive_int(raw, "sliding_window_pattern")
    return tuple(size if (i + 1) % every else None for i in range(layers))


def windows_with_full_first_of_every_n(
    every: int, raw: RawConfig, layers: int
) -> tuple[int | None, ...]:
    """Per layer the window or None, of families with full attention in layers 0, n, 2n, ….

    A ``sliding_window`` of null means full attention in all layers.

    Args:
        every: n, where the config has no ``layer_types``.
        raw: The config.
        layers: How many there are.
    """
    types = layer_types(raw, layers)
    if raw["sliding_window"] is None:
        refuse_sliding_layer_types(types)
        return ()
    size = positive_int(raw, "sliding_window")
    slides = [
        bool(layer % every) if types is None else types[layer] == SLIDING_ATTENTION
        for layer in range(layers)
    ]
    return tuple(size if each else None for each in slides)


def full_and_local_rope_configs(
    raw: RawConfig, theta: float, local_theta: float | None = None
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The config with the rotation of full attention, and with that of layers with a window.

    ``rope_parameters`` may have an object for each layer type; ``rope_scaling`` is of full
    attention alone.

    Args:
        raw: The config.
        theta: The base of full attention where the config names none.
        local_theta: The base of layers with a window; None: as of full attention.
    """
    parameters, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    base = raw.get("rope_theta")
    full: dict[str, Any] = {"rope_theta": theta if base is None else base}
    local = {"rope_theta": full["rope_theta"] if local_theta is None else local_theta}
    if isinstance(parameters, Mapping):
        unknown = parameters.keys() - {FULL_ATTENTION, SLIDING_ATTENTION}
        if unknown:
            raise CheckpointError(
                f"config.json: rope_parameters must have an object for {FULL_ATTENTION} and one "
                f"for {SLIDING_ATTENTION}, not {quote(sorted(unknown)[0], 60)}"
            )
        for layer_type, own in ((FULL_ATTENTION, full), (SLIDING_ATTENTION, local)):
            name = f"rope_parameters.{layer_type}"
            own.update(config_object(name, parameters.get(layer_type)))
    if isinstance(scaling, Mapping):
        _refuse_rope_scaling_type_key(scaling)
        full |= scaling
    check_layer_rope_scaling(raw, FULL_ATTENTION, full)
    check_layer_rope_scaling(raw, SLIDING_ATTENTION, local)
    return tuple(  # type: ignore[return-value]
        with_config_overrides(
            raw, {"rope_parameters": each, "rope_scaling": None, "rope_theta": None}
        )
        for each in (full, local)
    )


def _refuse_rope_scaling_type_key(scaling: Mapping[str, Any]) -> None:
    """Refuse a scaling whose type has the old name.

    transformers reads ``rope_type`` alone in families whose rotation differs by layer type.

    Raises:
        CheckpointError: for such a ``rope_scaling``.
    """
    old = scaling.get("type")
    if scaling.get("rope_type") is None and old not in (None, "default"):
        raise CheckpointError(
            f"config.json: rope_scaling.type={quote(old, 60)} is not supported where windows have "
            "a rotation of their own; its name is rope_type there"
        )


def require_layer_rope_thetas(parameters: Any) -> None:
    """Refuse rotations by layer type of which one has no base.

    transformers takes the base beside ``rope_parameters`` in some files, and fails on others.

    Args:
        parameters: ``rope_parameters``, which may have an object for each layer type.

    Raises:
        CheckpointError: for an object without ``rope_theta``.
    """
    for layer_type, own in parameters.items() if isinstance(parameters, Mapping) else ():
        if isinstance(own, Mapping) and own.get("rope_theta") is None:
            raise CheckpointError(f"config.json: rope_parameters.{layer_type} needs a rope_theta")


def check_layer_rope_scaling(raw: RawConfig, layer_type: str, scaling: Mapping[str, Any]) -> None:
    """Refuse a scaling of layers of one type whose meaning is not clear.

    transformers rounds YaRN's bounds whatever ``truncate`` says there, and takes another trained
    length for the one that stands beside ``rope_parameters``.

    Raises:
        CheckpointError: for a ``truncate`` of false, and for such a trained length.
    """
    scaling_type = scaling.get("rope_type", scaling.get("type"))
    if scaling_type == "yarn":
        name = f"rope_parameters.{layer_type}.truncate"
        require_supported_value({name: scaling.get("truncate")}, name, (True, None), None)
    trained = raw.get(ORIGINAL_MAX_POSITION_KEY) if scaling_type in ("llama3", "yarn") else None
    if trained not in (None, scaling.get(ORIGINAL_MAX_POSITION_KEY)):
        raise CheckpointError(
            f"config.json: {ORIGINAL_MAX_POSITION_KEY}={quote(trained, 60)} must stand in "
            f"rope_parameters.{layer_type} where windows have a rotation of their own"
        )


def layer_types(raw: RawConfig, layers: int) -> list[str] | None:
    """``layer_types``: FULL_ATTENTION or SLIDING_ATTENTION for each layer; None where it is absent.

    Raises:
        CheckpointError: for other types.
    """
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise CheckpointError(f"config.json: layer_types must be a list, not {quote(types, 60)}")
    types = [
        FULL_ATTENTION if layer_type == "attention" else layer_type for layer_type in types
    ]  # its name before transformers 5
    unknown = next(
        (
            layer_type
            for layer_type in types
            if layer_type not in (FULL_ATTENTION, SLIDING_ATTENTION)
        ),
        None,
    )
    if unknown is not None:
        raise CheckpointError(
            f"config.json: layer_types names {quote(unknown, 60)}, which is not computed (known: "
            f"{FULL_ATTENTION}, "
            f"{SLIDING_ATTENTION})"
        )
    if len(types) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(types)} layers where "
            f"num_hidden_layers={layers}; correct one of them"
        )
    return types


def refuse_sliding_windows(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """Return the sizes of a family without sliding windows.

    Runtimes treat these keys differently: transformers' cache keeps the window, its mask ignores
    it.

    Raises:
        CheckpointError: for a config with sliding windows.
    """
    on, size = read_boolean(raw, "use_sliding_window", True), raw.get("sliding_window")
    types = layer_types(raw, config.layers)
    if types is not None and SLIDING_ATTENTION in types:
        raise CheckpointError(
            f"config.json: layer_types names {SLIDING_ATTENTION}, which a "
            f"{raw.get('model_type', 'llama')} does not "
            f"have; take {FULL_ATTENTION} for every layer, or the model_type that these weights "
            "were trained as"
        )
    if on and size is not None and positive_int(raw, "sliding_window") < config.max_len:
        raise CheckpointError(
            f"config.json: sliding_window={size} is not supported for a "
            f"{raw.get('model_type', 'llama')}; set it to "
            "null for full attention, or model_type to mistral for windows"
        )
    return config


CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES)

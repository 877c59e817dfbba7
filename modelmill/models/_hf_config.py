"""Reads a Hugging Face config.json; a missing or wrong value is an error that names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, ReadTrackingConfig
from modelmill.nn.rotary import RopeSpec

MAX_CONFIG_INTEGER = 1 << 24
"""Above every real width, vocabulary and context; keeps nonsense from taking memory before weights
are looked at.
"""

MAX_LAYERS = 4096
MAX_CONFIG_FLOAT = 1e12
"""Above every real base, factor and epsilon; keeps float32 arithmetic on them finite."""


def positive_int(
    raw: RawConfig, *keys: str, default: int | None = None, max_value: int = MAX_CONFIG_INTEGER
) -> int:
    """The first of ``keys`` that is set, as an integer between 1 and ``max_value``."""
    value = require_consistent_alias_value(raw, keys, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max_value:
        raise CheckpointError(
            f"config.json: {first_set_key(raw, keys)} must be an integer between 1 and {max_value}"
            f", not {quote(value, 60)}"
        )
    return value


def first_set_key(raw: RawConfig, keys: tuple[str, ...]) -> str:
    """The one of some keys of one meaning that a config sets; the first, if it sets none."""
    return next((key for key in keys if raw.get(key) is not None), keys[0])


def num_layers(raw: RawConfig, *keys: str) -> int:
    """The number of layers."""
    return positive_int(raw, *keys, max_value=MAX_LAYERS)


def non_negative_float(raw: RawConfig, *keys: str, default: float | None = None) -> float:
    """The first of ``keys`` that is set, as a number from 0 up."""
    value = require_consistent_alias_value(raw, keys, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < MAX_CONFIG_FLOAT
    ):
        raise CheckpointError(
            f"config.json: {first_set_key(raw, keys)} must be a number from 0 up, not "
            f"{quote(value, 60)}"
        )
    return float(value)


def positive_float(raw: RawConfig, *keys: str, default: float | None = None) -> float:
    """The first of ``keys`` that is set, as a number above 0."""
    value = non_negative_float(raw, *keys, default=default)
    if value == 0:
        raise CheckpointError(f"config.json: {first_set_key(raw, keys)} must be above 0")
    return value


def exact_quotient(key: str, value: int, divisor_key: str, divisor: int) -> int:
    """Return the quotient; raises CheckpointError where the division leaves a rest."""
    if value % divisor:
        raise CheckpointError(
            f"config.json: {key}={value} is not a multiple of {divisor_key}={divisor}; "
            "correct one of them"
        )
    return value // divisor


def config_object(key: str, value: Any) -> Mapping[str, Any]:
    """The value of a key that holds an object, {} for null; raises CheckpointError for others."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {quote(value, 60)}")
    return value


def default_head_dim(hidden: int, heads: int) -> int:
    """Channels of a head where a config names no ``head_dim``."""
    return exact_quotient("hidden_size", hidden, "num_attention_heads", heads)


def checked_default_head_dim_override(raw: RawConfig, hidden: int, heads: int) -> dict[str, Any]:
    """The override of a family whose heads always are ``hidden / heads`` channels wide.

    Raises:
        CheckpointError: for a ``head_dim`` of another value.
    """
    require_supported_value(raw, "head_dim", (default_head_dim(hidden, heads), None), None)
    return {"head_dim": None}


def checked_rotary_channels(key: str, value: int, rotated: int) -> int:
    """Return the number of rotated channels, that ``key`` decides, if they form pairs."""
    if rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"config.json: {key}={value} rotates {rotated} channels of each head; rotary "
            "embeddings need pairs"
        )
    return rotated


def check_even_head_dim(key: str, value: int, head_dim: int) -> None:
    """Check the size of rotated heads, that ``key`` decides: kernels expect pairs of channels."""
    if head_dim % 2:
        raise CheckpointError(
            f"config.json: {key}={value} makes heads of {head_dim} channels; heads with rotary "
            "embeddings must have an even number of them"
        )


def read_boolean(raw: RawConfig, key: str, default: bool) -> bool:
    """Read a key of config.json that must be true or false.

    Raises:
        CheckpointError: for other values, and for a null that readers understand differently:
            transformers takes it for false.
    """
    value = raw.get(key)
    if value is None and default and key in raw:
        raise CheckpointError(
            f"config.json: {key} is null, which may mean true or false; write one of them"
        )
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, not {quote(value, 60)}")
    return value


ALL_BIASES_ENABLED: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
"""Fields of a decoder all of whose linear layers have a bias."""


def attention_bias_fields(
    raw: RawConfig, key: str = "attention_bias", default: bool = False
) -> dict[str, Any]:
    """The biases of a decoder's attention, where one key decides about all of them."""
    return dict.fromkeys(("qkv_bias", "out_bias"), read_boolean(raw, key, default))


def attention_and_mlp_bias_fields(raw: RawConfig) -> dict[str, Any]:
    """The biases of a decoder's linear layers, where two keys decide about them."""
    return {**attention_bias_fields(raw), "mlp_bias": read_boolean(raw, "mlp_bias", False)}


def linear_bias_fields(raw: RawConfig, key: str, default: bool) -> dict[str, Any]:
    """The biases of a decoder's linear layers, where one key decides about all of them."""
    return dict.fromkeys(ALL_BIASES_ENABLED, read_boolean(raw, key, default))


def check_vit_sizes(name: str, *, width: int, heads: int, image: int = 0, patch: int = 1) -> None:
    """Check that a vision transformer's sizes fit each other; without ``image``, of its width."""
    if width % heads:
        raise CheckpointError(
            f"config.json: {heads} heads do not divide the {name}'s width of {width}"
        )
    if image % patch:
        raise CheckpointError(
            f"config.json: patches of {patch} pixels do not divide an image of {image}"
        )


def require_supported_value(
    raw: RawConfig, key: str, allowed: tuple[Any, ...], default: Any
) -> None:
    """Refuse a value that would change the arithmetic and that we do not compute."""
    value = raw.get(key, default)
    if value not in allowed:
        raise CheckpointError(
            f"config.json: {key}={quote(value, 60)} is not supported (supported: "
            f"{', '.join(map(repr, allowed))})"
        )


def read_per_layer_list(
    raw: RawConfig, key: str, layers: int, is_known: Callable[[Any], bool], meaning: str
) -> list[Any] | None:
    """A list with a value for each layer; None where the key is absent.

    Args:
        raw: The config.
        key: The list's name.
        layers: How many there are.
        is_known: Whether a value is one that it may have.
        meaning: What these values are, for the message.

    Raises:
        CheckpointError: for other values, and another number of layers.
    """
    values = raw.get(key)
    known = isinstance(values, list) and all(map(is_known, values))
    if values is not None and (not known or len(values) != layers):
        raise CheckpointError(
            f"config.json: {key} must be a list of {meaning} for each of {layers} layers, not "
            f"{quote(values, 60)}"
        )
    return values


ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' names of activations → those of ``nn.mlp.ACTIVATION_FUNCTIONS``."""


def read_activation(raw: RawConfig, key: str, default: str) -> str:
    """The activation that a config names."""
    require_supported_value(raw, key, tuple(ACTIVATION_NAMES), default)
    return ACTIVATION_NAMES[raw.get(key, default)]


def read_non_unit_factor(raw: RawConfig, key: str) -> float | None:
    """A factor above 0; None for 1, which changes nothing."""
    value = positive_float(raw, key, default=1.0)
    return None if value == 1.0 else value


def optional_positive_float(raw: RawConfig, key: str, default: float | None = None) -> float | None:
    """A number above 0, such as a cap; None for null, and where ``default`` is None."""
    return None if raw.get(key, default) is None else positive_float(raw, key, default=default)


ORIGINAL_MAX_POSITION_KEY = "original_max_position_embeddings"

ROPE_SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "longrope": ((ORIGINAL_MAX_POSITION_KEY,), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_MAX_POSITION_KEY), ()),
    "yarn": (
        ("factor",),
        (
            ORIGINAL_MAX_POSITION_KEY,
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ),
    ),
}
"""Rope scalings by name: the numbers each needs, and those it may bring."""

LONGROPE_FACTOR_KEYS = ("short_factor", "long_factor")

COMMON_ROPE_SCALING_KEYS = ("rope_theta", "rope_type", "type")
"""Keys that every rope scaling may have, beside the numbers of its type (``ROPE_SCALING_KEYS``)."""


def rope_spec(
    raw: RawConfig,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    longrope: bool = False,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
) -> RopeSpec:
    """The rotation, from ``rope_theta`` and ``rope_scaling`` or the newer ``rope_parameters``.

    Args:
        raw: The config.
        head_dim: Channels of a head.
        max_positions: The longest sequence.
        theta: The base where the config names none.
        partial: In families that rotate a part of each head, which part where the config names
            none; None: a family that rotates all of it.
        longrope: Whether the family may scale by LongRoPE.
        theta_key: The base's name outside of ``rope_parameters``.
        partial_key: The name of ``partial_rotary_factor`` there.
    """
    name, scaling = _rope_scaling_key_and_value(raw)
    if scaling.get("rope_theta") is None:
        base = positive_float(raw, theta_key, default=theta)
    else:
        base = positive_float(scaling, "rope_theta")
    dim = head_dim
    if partial is not None:
        dim = _rotated_channels(raw, scaling, head_dim, partial, partial_key)
    if base == 1.0:
        raise CheckpointError("config.json: rope_theta=1 rotates nothing")
    scaling_type = scaling.get("rope_type", scaling.get("type", "default"))
    if longrope and scaling_type in ("su", "yarn"):  # its names in older files of Phi-3
        scaling["rope_type"] = scaling_type = "longrope"
    known = [each for each in ROPE_SCALING_KEYS if each != "longrope" or longrope]
    if not isinstance(scaling_type, str) or scaling_type not in known:
        raise CheckpointError(
            f"config.json: {name}: rope scaling {quote(scaling_type, 60)} is not supported "
            f"(known: {', '.join(known[1:])})"
        )
    if scaling_type != "default" and partial is None:
        # transformers turns such a fraction of each head only where it scales, and then no decoder
        # of ours fits it
        part = "partial_rotary_factor"
        require_supported_value(scaling if part in scaling else raw, part, (1, None), None)
    if (
        scaling_type in ("llama3", "yarn", "longrope")
        and raw.get(ORIGINAL_MAX_POSITION_KEY) is not None
    ):
        scaling[ORIGINAL_MAX_POSITION_KEY] = positive_float(raw, ORIGINAL_MAX_POSITION_KEY)
    if scaling_type in ("llama3", "longrope") and scaling.get(ORIGINAL_MAX_POSITION_KEY) is None:
        scaling[ORIGINAL_MAX_POSITION_KEY] = max_positions
    needed, optional = ROPE_SCALING_KEYS[scaling_type]
    _check_rope_scaling_numbers(name, scaling, needed, optional)
    if scaling_type == "yarn":
        read_boolean(scaling, "truncate", True)
        fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        if fast < slow:
            raise CheckpointError(
                f"config.json: {name}: yarn needs beta_fast (now {fast:g}) of at least beta_slow "
                f"(now {slow:g}); "
                "are the two exchanged?"
            )
    if scaling_type == "longrope":
        for key in LONGROPE_FACTOR_KEYS:
            _check_longrope_factors(scaling.get(key), f"{name}.{key}", dim // 2)
    if isinstance(raw, ReadTrackingConfig):
        more = {"yarn": ("truncate",), "longrope": LONGROPE_FACTOR_KEYS}.get(scaling_type, ())
        read = {*COMMON_ROPE_SCALING_KEYS, *needed, *optional, *more}
        if partial is not None:
            read.add("partial_rotary_factor")
        raw.mark_unread(
            {f"{name}.{key}": value for key, value in scaling.items() if key not in read}
        )
    if scaling_type == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise CheckpointError(
            f"config.json: {name}: llama3 needs low_freq_factor below high_freq_factor"
        )
    return RopeSpec(dim, base, max_positions, scaling)


def _rotated_channels(
    raw: RawConfig, scaling: Mapping[str, Any], head_dim: int, partial: float, key: str
) -> int:
    """How many channels of a head ``partial_rotary_factor`` rotates; key: its name in ``raw``."""
    source, inner = raw, scaling.get("partial_rotary_factor")
    if inner is not None:
        outer = raw.get(key)
        if outer not in (None, inner) and isinstance(raw, ReadTrackingConfig):
            raw.mark_unread({key: outer})
        source, key = scaling, "partial_rotary_factor"
    share = positive_float(source, key, default=partial)
    dim = int(head_dim * share)
    if share > 1 or dim % 2 or dim == 0:
        raise CheckpointError(
            f"config.json: {key}={share:g} rotates {dim} channels of each head "
            f"(head_dim={head_dim}); it must be an even number of them, from 2 up"
        )
    return dim


def _check_rope_scaling_numbers(
    name: str, scaling: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Check the numbers of a rope scaling; ``name`` is its key in the config."""
    numbers = {f"{name}.{key}": value for key, value in scaling.items()}
    for key in needed:
        positive_float(numbers, f"{name}.{key}")
    for key in optional:
        if scaling.get(key) is not None:
            non_negative_float(numbers, f"{name}.{key}")


def _check_longrope_factors(values: Any, key: str, count: int) -> None:
    """Check a list of LongRoPE's divisors of frequencies."""
    if (
        not isinstance(values, list)
        or len(values) != count
        or any(isinstance(v, bool) or not isinstance(v, int | float) or v <= 0 for v in values)
    ):
        raise CheckpointError(
            f"config.json: {key} must be a list of {count} numbers above 0, one for each "
            f"rotated pair, not {quote(values, 60)}"
        )


def _rope_scaling_key_and_value(raw: RawConfig) -> tuple[str, dict[str, Any]]:
    """The key and the value of ``rope_scaling``, or of ``rope_parameters`` where that is absent.

    Never a mixture of the two, as in transformers.
    """
    first, second = (raw.get(key) for key in ("rope_scaling", "rope_parameters"))
    for key, scaling in (("rope_scaling", first), ("rope_parameters", second)):
        parameters = config_object(key, scaling)
        nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
        if nested:
            raise CheckpointError(
                f"config.json: {key} has an object of its own for {quote(nested[0], 60)}; "
                "a rotation that differs by layer is not supported"
            )
        if parameters:
            return key, dict(parameters)
    return "rope_scaling", {}


def scaled_rope_max_len(spec: RopeSpec, max_positions: int) -> int:
    """Longest sequence a scaled rotation is meant for."""
    factor = float(spec.scaling.get("factor") or 1.0)
    if spec.scaling_type in ("linear", "dynamic"):
        return max(1, min(int(max_positions * factor), MAX_CONFIG_INTEGER))
    if spec.scaling_type == "yarn":
        trained = float(spec.scaling.get(ORIGINAL_MAX_POSITION_KEY) or 0)
        return max(max_positions, min(int(trained * factor), MAX_CONFIG_INTEGER))
    return max_positions


def require_consistent_alias_value(raw: RawConfig, keys: tuple[str, ...], default: Any) -> Any:
    """The value of keys that mean the same.

    Raises CheckpointError where two of them contradict each other.
    """
    named = [key for key in keys if raw.get(key) is not None]
    if not named:
        if default is None:
            state = "null" if keys[0] in raw else "missing"
            raise CheckpointError(f"config.json: {keys[0]} is {state}")
        return default
    value = raw[named[0]]
    for other in named[1:]:
        if raw[other] != value:
            raise CheckpointError(
                f"config.json: {named[0]}={quote(value, 60)} and {other}={quote(raw[other], 60)} "
                "mean the same and "
                "contradict each other; correct one of them"
            )
    return value

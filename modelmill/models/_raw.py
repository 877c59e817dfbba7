"""Reading a foreign config.json: a missing or wrong value is the checkpoint's fault, and is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import ConfigView
from modelmill.core.errors import CheckpointError
from modelmill.core.quote import quoted
from modelmill.nn.rotary import RopeSpec

MAX_SIZE = 1 << 24
"""Above every real width, vocabulary and context; keeps nonsense from taking memory before weights are looked at."""

MAX_LAYERS = 4096
LARGEST = 1e12
"""Above every real base, factor and epsilon; keeps float32 arithmetic on them finite."""


def whole(raw: Mapping[str, Any], *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """The first of ``keys`` that is set, as a whole number from 1 to ``most``."""
    value = _first(raw, keys, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise CheckpointError(
            f"config.json: {keys[0]} must be a whole number from 1 to {most}, not {quoted(value, 60)}"
        )
    return value


def depth(raw: Mapping[str, Any], *keys: str) -> int:
    """The number of layers."""
    return whole(raw, *keys, most=MAX_LAYERS)


def number(raw: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """The first of ``keys`` that is set, as a number from 0 up."""
    value = _first(raw, keys, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LARGEST:
        raise CheckpointError(f"config.json: {keys[0]} must be a number from 0 up, not {quoted(value, 60)}")
    return float(value)


def positive(raw: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """The first of ``keys`` that is set, as a number above 0."""
    value = number(raw, *keys, default=default)
    if value == 0:
        raise CheckpointError(f"config.json: {keys[0]} must be above 0")
    return value


def switch(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """A true/false key."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, not {quoted(value, 60)}")
    return value


def require(raw: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    """Refuse a value that would change the arithmetic and that we do not compute."""
    value = raw.get(key, default)
    if value not in allowed:
        raise CheckpointError(
            f"config.json: {key}={quoted(value, 60)} is not supported (supported: {', '.join(map(repr, allowed))})"
        )


TRAINED = "original_max_position_embeddings"

SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", TRAINED), ()),
    "yarn": (
        ("factor",),
        (
            TRAINED,
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ),
    ),
}
"""Rope scalings by name: the numbers each needs, and those it may bring."""

ROPE_KEYS = ("rope_theta", "rope_type", "type")
"""What any rope scaling may hold beside its numbers."""


def rope(raw: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    """The rotation, from ``rope_theta`` and ``rope_scaling`` or from the newer ``rope_parameters``."""
    name, scaling = _scaling(raw)
    base = positive(raw if scaling.get("rope_theta") is None else scaling, "rope_theta", default=10000.0)
    if base == 1.0:
        raise CheckpointError("config.json: rope_theta=1 rotates nothing")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(
            f"config.json: {name}: rope scaling {quoted(kind, 60)} is not supported (known: linear, dynamic, llama3, "
            "yarn)"
        )
    if kind != "default":
        # transformers turns such a fraction of each head only where it scales, and then no decoder of ours fits it
        part = "partial_rotary_factor"
        require(scaling if part in scaling else raw, part, (1, None), None)
    if kind in ("llama3", "yarn") and raw.get(TRAINED) is not None:
        scaling[TRAINED] = positive(raw, TRAINED)
    if kind == "llama3" and scaling.get(TRAINED) is None:
        scaling[TRAINED] = max_positions
    needed, optional = SCALINGS[kind]
    for key in needed:
        positive(scaling, key)
    for key in optional:
        if scaling.get(key) is not None:
            number(scaling, key)
    if kind == "yarn":
        switch(scaling, "truncate", True)
        fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        if fast < slow:
            raise CheckpointError(
                f"config.json: {name}: yarn needs beta_fast (now {fast:g}) of at least beta_slow (now {slow:g}); "
                "are the two exchanged?"
            )
    if isinstance(raw, ConfigView):
        read = {*ROPE_KEYS, *needed, *optional, *(["truncate"] if kind == "yarn" else [])}
        raw.leave({f"{name}.{key}": value for key, value in scaling.items() if key not in read})
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise CheckpointError(f"config.json: {name}: llama3 needs low_freq_factor below high_freq_factor")
    return RopeSpec(dim, base, max_positions, scaling)


def _scaling(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its key and ``rope_scaling``, or ``rope_parameters`` where there is none: never a mixture, as in transformers."""
    first, second = (raw.get(key) for key in ("rope_scaling", "rope_parameters"))
    for key, found in (("rope_scaling", first), ("rope_parameters", second)):
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise CheckpointError(f"config.json: {key} must be an object, not {quoted(found, 60)}")
        nested = [name for name, value in found.items() if isinstance(value, Mapping)]
        if nested:
            raise CheckpointError(
                f"config.json: {key} has an object of its own for {quoted(nested[0], 60)}; "
                "a rotation that differs by layer is not supported"
            )
        if found:
            return key, dict(found)
    return "rope_scaling", {}


def longest(spec: RopeSpec, max_positions: int) -> int:
    """Longest sequence a scaled rotation is meant for."""
    factor = float(spec.scaling.get("factor") or 1.0)
    if spec.kind in ("linear", "dynamic"):
        return max(1, min(int(max_positions * factor), MAX_SIZE))
    if spec.kind == "yarn":
        trained = float(spec.scaling.get(TRAINED) or 0)
        return max(max_positions, min(int(trained * factor), MAX_SIZE))
    return max_positions


def _first(raw: Mapping[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    """The value of keys that mean the same. Raises CheckpointError where two of them contradict each other."""
    named = [key for key in keys if raw.get(key) is not None]
    if not named:
        if default is None:
            raise CheckpointError(f"config.json: {keys[0]} is missing")
        return default
    value = raw[named[0]]
    for other in named[1:]:
        if raw[other] != value:
            raise CheckpointError(
                f"config.json: {named[0]}={quoted(value, 60)} and {other}={quoted(raw[other], 60)} mean the same and "
                "contradict each other; correct one of them"
            )
    return value

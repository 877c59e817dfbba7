"""Reading a foreign config.json: a missing or wrong value is the checkpoint's fault, and is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.nn.rotary import RopeSpec


def whole(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of ``keys`` that is set, as a positive whole number."""
    value = _first(raw, keys, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {keys[0]} must be a positive whole number, not {value!r}")
    return value


def number(raw: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """The first of ``keys`` that is set, as a number."""
    value = _first(raw, keys, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value == value:
        raise CheckpointError(f"config.json: {keys[0]} must be a number, not {value!r}")
    return float(value)


def switch(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """A true/false key."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def require(raw: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    """Refuse a value that would change the arithmetic and that we do not compute."""
    value = raw.get(key, default)
    if value not in allowed:
        raise CheckpointError(
            f"config.json: {key}={value!r} is not supported (supported: {', '.join(map(repr, allowed))})"
        )


def rope(raw: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    """The rotation, from ``rope_theta`` and ``rope_scaling`` or from the newer ``rope_parameters``."""
    scaling: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        found = raw.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(f"config.json: {key} must be an object, not {found!r}")
        scaling.update(found or {})
    base = number({**scaling, **{k: v for k, v in raw.items() if v is not None}}, "rope_theta", default=10000.0)
    factors = scaling.get("factors")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} is not supported (known: linear, dynamic, llama3, yarn)"
        )
    needed: tuple[str, ...] = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}.get(kind, ())
    if kind == "llama3":
        needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in needed:
        number(scaling, key)
    return RopeSpec(dim, base, max_positions, scaling, factors=None if factors is None else tuple(factors))


def longest(spec: RopeSpec, max_positions: int) -> int:
    """Longest sequence a scaled rotation is meant for."""
    factor = float(spec.scaling.get("factor", 1.0))
    if spec.kind in ("linear", "dynamic"):
        return int(max_positions * factor)
    if spec.kind == "yarn":
        return max(max_positions, int(float(spec.scaling.get("original_max_position_embeddings") or 0) * factor))
    return max_positions


def _first(raw: Mapping[str, Any], keys: tuple[str, ...], default: Any) -> Any:
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    if default is None:
        raise CheckpointError(f"config.json: {keys[0]} is missing")
    return default

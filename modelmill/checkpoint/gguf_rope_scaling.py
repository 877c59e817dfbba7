"""Converts a GGUF's rotary scaling to Hugging Face's `rope_scaling` dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import CheckpointError, CorruptCheckpoint

LLAMA3_DEFAULTS = (1.0, 4.0, 8192.0)
"""low_freq_factor, high_freq_factor and original context of all scaled Llama 3 models."""

YARN_LOG_MULTIPLIER_KEY = "yarn_log_multiplier"
TOLERANCE = 1e-3

MAX_ROPE_NUMBER = 1e12
"""Above every real factor, base and length; prevents overflows."""


def linear_or_yarn_rope_scaling(
    metadata: Mapping[str, Any], arch: str, computed: str = ""
) -> dict[str, Any] | None:
    """Return linear or YaRN scaling of a GGUF's keys; None without scaling.

    As in llama.cpp, a factor without a type means linear, and a type without a factor is ignored.

    Args:
        metadata: the file's keys.
        arch: the architecture.
        computed: a key that the caller reads.

    Raises:
        CheckpointError: for an unsupported type or key.
    """
    _reject_unsupported_keys(metadata, arch, computed)
    prefix = f"{arch}.rope.scaling."
    factor = _positive_float_or_none(metadata, prefix + "factor") or _positive_float_or_none(
        metadata, f"{arch}.rope.scale_linear"
    )
    scaling_type = metadata.get(prefix + "type", "linear")
    if not isinstance(scaling_type, str):
        raise CorruptCheckpoint(f"the GGUF's key {prefix}type is no text")
    if scaling_type == "none" or factor is None or (scaling_type == "linear" and factor == 1.0):
        return None
    if scaling_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling_type != "yarn":
        raise CheckpointError(
            f"the GGUF scales positions by {scaling_type!r}, which modelmill does not compute"
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = original_context_length(metadata, arch) or _positive_float_or_none(
        metadata, f"{arch}.context_length"
    )
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    for hf_name, gguf_name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = _positive_float_or_none(metadata, prefix + gguf_name)
        if value is not None:
            scaling[hf_name] = value
    return scaling


def rope_scaling_from_yarn_multiplier(
    metadata: Mapping[str, Any], arch: str, share: float
) -> dict[str, Any] | None:
    """Return the scaling of families that multiply YaRN's temperature; None without scaling.

    Args:
        metadata: the file's keys.
        arch: the architecture.
        share: what the stored multiplier is of ``mscale_all_dim``, which ``mscale`` equals.

    Raises:
        CheckpointError: as ``linear_or_yarn_rope_scaling``.
    """
    scaling = linear_or_yarn_rope_scaling(metadata, arch, computed=YARN_LOG_MULTIPLIER_KEY)
    multiplier = _positive_float_or_none(metadata, f"{arch}.rope.scaling.{YARN_LOG_MULTIPLIER_KEY}")
    if scaling is None or multiplier is None or scaling["rope_type"] != "yarn":
        return scaling
    mscale = float(f"{multiplier / share:.6g}")  # stored in float32
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _reject_unsupported_keys(metadata: Mapping[str, Any], arch: str, computed: str = "") -> None:
    """Raise CheckpointError for a key that changes the rotation in an unsupported way.

    llama.cpp reads these for every architecture and every type. Neutral are: factors of 1; an
    extrapolation equal to its default (a negative one, 1 for YaRN, 0 for the rest); a multiplier of
    0. computed: a key that the caller reads.
    """
    prefix = f"{arch}.rope.scaling."
    extrapolation = 1.0 if str(metadata.get(prefix + "type")) == "yarn" else 0.0
    neutral = {
        "attn_factor": 1.0,
        "yarn_attn_factor": 1.0,
        "yarn_ext_factor": extrapolation,
        YARN_LOG_MULTIPLIER_KEY: 0.0,
    }
    neutral.pop(computed, None)
    for name, meaningless in neutral.items():
        value = metadata.get(prefix + name, meaningless)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < MAX_ROPE_NUMBER
        ):
            raise CorruptCheckpoint(
                f"the GGUF's key {prefix}{name} is {str(value)[:40]!r}, which makes no sense"
            )
        if value != meaningless and not (name == "yarn_ext_factor" and value < 0):
            raise CheckpointError(
                f"the GGUF's key {prefix}{name} is {value:g}, which modelmill does not compute"
            )


def rope_scaling_from_rope_freqs(
    metadata: Mapping[str, Any], arch: str, factors: Sequence[float], theta: float
) -> dict[str, Any] | None:
    """Return Llama 3's scaling of a GGUF with rope_freqs.weight.

    Raises:
        CheckpointError: as linear_or_yarn_rope_scaling and llama3_from_factors.
    """
    _reject_unsupported_keys(metadata, arch)
    return llama3_from_factors(factors, theta, original_context_length(metadata, arch))


def rope_scaling_from_longrope(
    metadata: Mapping[str, Any], arch: str, short: Sequence[float], long: Sequence[float]
) -> dict[str, Any]:
    """Return LongRoPE's scaling of a GGUF with rope_factors_short and rope_factors_long.

    Args:
        metadata: the file's keys.
        arch: the architecture.
        short: the divisors of the frequencies up to the trained length.
        long: those beyond it.

    Raises:
        CheckpointError: for divisors that are no positive numbers, or an unsupported key.
    """
    if not all(0 < value < MAX_ROPE_NUMBER for value in (*short, *long)):
        raise CorruptCheckpoint("a factor of the GGUF's rope_factors is no positive number")
    _reject_unsupported_keys(metadata, arch, computed="attn_factor")
    scaling = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
    stated = _positive_float_or_none(metadata, f"{arch}.rope.scaling.attn_factor")
    return scaling if stated is None else {**scaling, "attention_factor": stated}


def original_context_length(metadata: Mapping[str, Any], arch: str) -> float | None:
    """Return the context length before scaling, if the file contains it."""
    return _positive_float_or_none(metadata, f"{arch}.rope.scaling.original_context_length")


def _positive_float_or_none(metadata: Mapping[str, Any], key: str) -> float | None:
    """Return a key's number; None if it is absent or 0.

    Raises:
        CorruptCheckpoint: for anything else.
    """
    value = metadata.get(key, 0)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < MAX_ROPE_NUMBER
    ):
        raise CorruptCheckpoint(
            f"the GGUF's key {key} is {str(value)[:40]!r}, which makes no sense"
        )
    return float(value) or None


def llama3_from_factors(
    factors: Sequence[float], theta: float, original: float | None
) -> dict[str, Any] | None:
    """Return Llama 3's scaling from the divisors in rope_freqs.weight, one per frequency.

    The divisors determine both band factors only relative to the context length, so the published
    numbers are tried first, then the pair that fits the context; either computes the same
    frequencies.

    Args:
        factors: the divisors.
        theta: the rotary base.
        original: the context length before scaling, if the file contains it.

    Raises:
        CheckpointError: if no such scaling gives these divisors.
    """
    # The divisors are computed in float32: use the shortest decimal near the largest.
    factor = float(f"{max(factors, default=1.0):.6g}")
    if all(abs(value - 1.0) <= TOLERANCE for value in factors):
        return None
    if not (1.0 < factor < MAX_ROPE_NUMBER and 1.0 <= theta < MAX_ROPE_NUMBER):
        raise CheckpointError("the GGUF's rope_freqs.weight or rope.freq_base makes no sense")
    low, high, usual = LLAMA3_DEFAULTS
    context = float(max(1, round(original or usual)))
    tried = [(low, high)]
    fitted = _fit_llama3_bands(factors, theta, factor, context)
    if fitted is not None:
        tried.append(fitted)
    for low, high in tried:
        made = llama3_frequency_divisors(len(factors), theta, factor, (low, high, context))
        if all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(made, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(context),
            }
    raise CheckpointError(
        "the GGUF's rope_freqs.weight follows no rotary scaling that modelmill computes"
    )


def llama3_frequency_divisors(
    num_frequencies: int, theta: float, factor: float, bands: tuple[float, float, float]
) -> list[float]:
    """Return the divisor of each frequency in Llama 3's scaling.

    bands: low, high, original context.
    """
    low, high, context = bands
    result = []
    for i in range(num_frequencies):
        turns = context / _wavelength(i, num_frequencies, theta)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


def _wavelength(i: int, count: int, theta: float) -> float:
    return 2.0 * math.pi * theta ** (i / count)


def _fit_llama3_bands(
    factors: Sequence[float], theta: float, factor: float, context: float
) -> tuple[float, float] | None:
    """Return (low, high) through the first and last divisor between the bands, or None.

    smooth = (context / wavelength − low) / (high − low) is linear in 1 / wavelength.
    """
    points = []
    for i, value in enumerate(factors):
        if 1.0 + TOLERANCE < value < factor * (1.0 - TOLERANCE):
            smooth = (1.0 / value - 1.0 / factor) / (1.0 - 1.0 / factor)
            points.append((1.0 / _wavelength(i, len(factors), theta), smooth))
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return None
    slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    crossing = points[0][1] - slope * points[0][0]
    if slope <= 0 or crossing >= 0:
        return None
    width = context / slope
    return -crossing * width, width - crossing * width

"""Rotary position tables, dense: one row of cosines and sines per position of the whole sequence.

Half rotation: channel i turns with channel i + dim/2 by the angle position · frequency_i. Kinds of
scaling:

* default   frequency_i = theta^(-2i/dim)
* linear    every frequency divided by ``factor``
* dynamic   theta grows with the length, once that exceeds the trained length (``max_position``)
* llama3    low frequencies divided by ``factor``, high ones kept, a straight ramp between
* yarn      the ramp goes by the number of turns within the trained length; cos and sin carry a temperature
* longrope  a divisor per frequency from one of two lists, by whether the length exceeds the trained one
* factors   one divisor per frequency, given as a tensor (how GGUF files store llama3)
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelmill.core.errors import UnknownArchitecture

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True)
class ReferenceRope:
    """How positions become angles.

    Attributes:
        rotary_dim: rotated channels per head.
        max_position: the length the model was trained on.
        options: the raw scaling dictionary (factor, low_freq_factor, …).
        factors: [dim/2] or None.
    """

    rotary_dim: int
    theta: float
    max_position: int
    rope_type: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    factors: Tensor | None = None

    def cos_sin(self, count: int, prompt_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [count, dim/2] for positions 0..count-1.

        The first ``prompt_length`` positions were computed in one prefill. The angle is the product
        of position and frequency in ``dtype`` itself, as the original models were trained and run,
        so float32 has float32's rounding.
        """
        positions = torch.arange(count, dtype=dtype)[:, None]
        angles = positions * self.frequencies(count, prompt_length, dtype)
        temperature = self.attention_factor()
        return angles.cos() * temperature, angles.sin() * temperature

    def frequencies(self, count: int, prompt_length: int, dtype: torch.dtype) -> Tensor:
        """Return radians per position: [1, dim/2], or [count, dim/2] for dynamic scaling."""
        exponents = (torch.arange(0, self.rotary_dim, 2, dtype=dtype) / self.rotary_dim)[None, :]
        if self.rope_type == "dynamic":
            return 1.0 / self._dynamic_theta(count, prompt_length).to(dtype)[:, None] ** exponents
        plain = 1.0 / self.theta**exponents
        if self.rope_type == "default":
            return plain
        if self.rope_type == "linear":
            return plain / float(self.options["factor"])
        if self.rope_type == "llama3":
            return self._llama3_frequencies(plain)
        if self.rope_type == "yarn":
            return self._yarn_frequencies(plain)
        if self.rope_type == "longrope":
            return plain / self._longrope_divisors(count, prompt_length).to(dtype)
        if self.rope_type == "factors" and self.factors is not None:
            return plain / self.factors.to(dtype)[None, :]
        raise UnknownArchitecture(
            f"RoPE scaling {self.rope_type!r} is not known here; known are {', '.join(ROPE_TYPES)}"
        )

    @property
    def last_unscaled_length(self) -> int | None:
        """Return the longest prompt with the frequencies of short ones; None: all have the same."""
        lengths = {"dynamic": self.max_position, "longrope": self._original_max_position()}
        return int(lengths[self.rope_type]) if self.rope_type in lengths else None

    def attention_factor(self) -> float:
        """Return the factor of cos and sin: 1, except for yarn and longrope."""
        if self.rope_type == "longrope":
            return self._longrope_attention_factor()
        if self.rope_type != "yarn":
            return 1.0
        attention_factor = self.options.get("attention_factor")
        if attention_factor is not None:
            return float(attention_factor)
        over, under = self.options.get("mscale"), self.options.get("mscale_all_dim")
        factor = self._yarn_scaling_factor()
        if over and under:
            return _yarn_mscale(factor, float(over)) / _yarn_mscale(factor, float(under))
        return _yarn_mscale(factor, 1.0)

    def _dynamic_theta(self, count: int, prompt_length: int) -> Tensor:
        """Return [count] float64: theta for the length known when each position was computed.

        A prompt position uses the length of the whole prompt; a decoded one at position p uses p +
        1.
        """
        position = torch.arange(count, dtype=torch.float64)
        known = torch.where(position < prompt_length, float(prompt_length), position + 1)
        known = known.clamp(min=float(self.max_position))
        factor = float(self.options["factor"])
        growth = factor * known / self.max_position - (factor - 1)
        return self.theta * growth ** (self.rotary_dim / (self.rotary_dim - 2))

    def _longrope_divisors(self, count: int, prompt_length: int) -> Tensor:
        """Return [count, dim/2]: the short list's or the long list's row for each position.

        A prompt takes one list for all of its positions, a decoded position p that of length p + 1.
        """
        position = torch.arange(count)
        known = torch.where(position < prompt_length, prompt_length, position + 1)
        lists = torch.tensor([self.options["short_factor"], self.options["long_factor"]])
        return lists[(known > self._original_max_position()).long()]

    def _longrope_attention_factor(self) -> float:
        """Return √(1 + ln(longer / trained) / ln(trained)), 1 where nothing is longer."""
        stated = self.options.get("attention_factor")
        if stated is not None:
            return float(stated)
        trained = self._original_max_position()
        ratio = float(self.options.get("factor") or self.max_position / trained)
        return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(trained))

    def _original_max_position(self) -> float:
        return float(self.options.get("original_max_position_embeddings") or self.max_position)

    def _llama3_frequencies(self, plain: Tensor) -> Tensor:
        factor, low, high = (
            float(self.options[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
        )
        turns = self._original_max_position() * plain / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / factor

    def _yarn_scaling_factor(self) -> float:
        factor = self.options.get("factor")
        return (
            float(factor)
            if factor is not None
            else self.max_position / self._original_max_position()
        )

    def _yarn_frequencies(self, plain: Tensor) -> Tensor:
        def channel(turns: float) -> float:
            """Return the frequency index with this many turns within the trained length."""
            wavelength = self._original_max_position() / turns
            return (
                self.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))
            )

        first = channel(float(self.options.get("beta_fast") or 32))
        last = channel(float(self.options.get("beta_slow") or 1))
        if self.options.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        if first == last:
            last += 0.001
        index = torch.arange(self.rotary_dim // 2, dtype=plain.dtype)[None, :]
        stretch = ((index - first) / (last - first)).clamp(0, 1)
        return stretch * plain / self._yarn_scaling_factor() + (1 - stretch) * plain


def _yarn_mscale(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def rope_from_config(config: Mapping[str, Any], dim: int, max_position: int) -> ReferenceRope:
    """Return the rotary embedding of a Hugging Face config.

    It reads ``rope_theta`` + ``rope_scaling``, or both in ``rope_parameters``.
    ``partial_rotary_factor`` is not read by these families' default RoPE, and their scaled ones
    fail on it.
    """
    options = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope_type = str(options.get("rope_type") or options.get("type") or "default")
    theta = options.get("rope_theta") or config.get("rope_theta") or 10000.0
    if config.get("original_max_position_embeddings"):
        options["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    part = options.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if rope_type != "default" and part != 1:
        raise UnknownArchitecture(
            f"RoPE scaling {rope_type!r} of {part} of each head is not known here"
        )
    if any(isinstance(value, Mapping) for value in options.values()):
        raise UnknownArchitecture("a rotation that differs from layer to layer is not known here")
    if rope_type not in ROPE_TYPES[:-2]:
        raise UnknownArchitecture(
            f"RoPE scaling {rope_type!r} is not known here; known are {', '.join(ROPE_TYPES[:-2])}"
        )
    return ReferenceRope(dim, float(theta), max_position, rope_type, options)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by tables [T, dim/2]; channels beyond dim are not rotated."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + dim/2 of the first dim channels of x [T, heads, head_dim]."""
    return apply_rope(x, cos, sin)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels 2i and 2i + 1 of the first dim channels of x [T, heads, head_dim]."""
    dim = 2 * cos.shape[-1]
    even, odd = x[..., 0:dim:2], x[..., 1:dim:2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = x.clone()
    turned[..., 0:dim:2] = even * cos - odd * sin
    turned[..., 1:dim:2] = odd * cos + even * sin
    return turned


def partial_rope_from_config(
    config: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    factor: float = 1.0,
    theta: float = 10000.0,
) -> ReferenceRope:
    """Return the rotary embedding of a family that turns a part of each head.

    factor, theta: the family's ``partial_rotary_factor`` and base where the config names none.
    """
    options = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    part = options.get("partial_rotary_factor", config.get("partial_rotary_factor", factor))
    rope_type = str(options.get("rope_type") or options.get("type") or "default")
    base = options.get("rope_theta") or config.get("rope_theta") or theta
    if config.get("original_max_position_embeddings"):
        options["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if any(isinstance(value, Mapping) for value in options.values()):
        raise UnknownArchitecture("a rotation that differs from layer to layer is not known here")
    return ReferenceRope(int(head_dim * part), float(base), max_position, rope_type, options)


def layer_type_rope(own: Mapping[str, Any], dim: int, length: int) -> ReferenceRope:
    """Return the rotation of the layers of one type.

    A proportional one turns the first pairs alone, by the frequencies of whole heads.

    own: its object in ``rope_parameters``.
    """
    if own.get("rope_type") != "proportional":
        return rope_from_config({"rope_parameters": own}, dim, length)
    share = float(own.get("partial_rotary_factor", 1.0))
    divisors = torch.full((dim // 2,), float("inf"))  # pairs that stand still
    divisors[: int(share * dim // 2)] = float(own.get("factor") or 1.0)
    return ReferenceRope(dim, float(own["rope_theta"]), length, "factors", {}, divisors)

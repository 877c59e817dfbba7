"""Rotary position embeddings and all their scalings (Su et al. 2021, arXiv:2104.09864).

A rotation may depend on a length: Qwen v1's dynamic NTK takes it from the request's prompt and
keeps it, LLaMA's "dynamic" and Phi-3's LongRoPE take it from the prompt during prefill and from the
position afterwards. The runtime therefore gets from the model a *rope frequency id* per token
(``rule`` says from which length) and hands the ids back in the Step. Id 0: unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import CheckpointError
from modelmill.nn.step import Step
from modelmill.ops.rope_cos_sin import RopeCosSinInputs

NTK_SCALINGS = ("dynamic", "qwen_ntk")


@dataclass(frozen=True)
class RopeSpec:
    """What a rotation is made of.

    Attributes:
        dim: Rotated channels per head.
        scaling: The raw ``rope_scaling`` dict.
        trained_len: Positions seen in training.

    Raises:
        CheckpointError: for a dim that cannot be rotated.
    """

    dim: int
    base: float
    trained_len: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    ntk_length: int | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise CheckpointError(
                f"heads of {self.dim} channels have no pairs for rotary embeddings to turn"
            )
        if self.dim == 2 and self.scaling_type in NTK_SCALINGS:
            # the base grows with the power dim / (dim - 2)
            raise CheckpointError(
                "heads of 2 channels cannot be stretched by dynamic NTK: they need 4 or more"
            )

    @property
    def scaling_type(self) -> str:
        """The scaling's name; "default" where there is none."""
        if self.ntk_length is not None:
            return "qwen_ntk"
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))


class Rotary(nn.Module):
    """A step's positions and rope frequency ids → (cos, sin), each [T, D/2] float32.

    With them Qwen v1's factors on q, [T], or None.

    Attributes:
        rule: Which length decides the rope frequency id; "fixed": none.

    Raises:
        CheckpointError: for an unknown scaling.
    """

    inv_freq: torch.Tensor
    inv_freq_table: torch.Tensor | None

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        rules = {"qwen_ntk": "prompt", "dynamic": "running", "longrope": "running"}
        self.rule = rules.get(spec.scaling_type, "fixed")
        inv_freq, self.factor = _length_independent_freqs_and_factor(spec)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        # one row a key, made once: in a graph, a row is one small kernel and its powers would be
        # ten
        makers = {"qwen_ntk": _qwen_ntk_inv_freq_table, "longrope": _longrope_inv_freq_table}
        make_table = makers.get(spec.scaling_type)
        table = None if make_table is None else make_table(spec, inv_freq)
        self.register_buffer("inv_freq_table", table, persistent=False)

    def frequency_id_for_length(self, length: int) -> int:
        """The key of a token whose deciding length is ``length``."""
        if self.rule == "prompt":
            return ntk_doublings(length, self.spec.ntk_length or length)
        if self.spec.scaling_type == "longrope":
            return int(length > float(self.spec.scaling["original_max_position_embeddings"]))
        if self.rule == "running":
            return 0 if length <= self.spec.trained_len else length
        return 0

    def frequencies_of_prompt(self, length: int) -> torch.Tensor:
        """Frequencies of the tokens of a prompt, [D/2]."""
        key = self.frequency_id_for_length(length)
        if self.spec.scaling_type == "dynamic":
            return self._frequencies_by_token(torch.tensor([key], device=self.inv_freq.device))[0]
        return self.inv_freq if self.inv_freq_table is None else self.inv_freq_table[key]

    def forward(
        self, step: Step, logn: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """logn: the length from which q grows, or None; by factors rounded to dtype."""
        keys = step.rope_frequency_ids
        if self.spec.scaling_type == "dynamic":
            # a row of frequencies for each token
            table, keys = (
                self._frequencies_by_token(keys),
                torch.arange(len(keys), device=keys.device),
            )
        else:
            stored = self.inv_freq_table
            table = self.inv_freq[None] if stored is None else stored
        return step.ops.rope_cos_sin(
            RopeCosSinInputs(step.positions, keys, table, self.factor, logn, dtype)
        )

    def _frequencies_by_token(self, keys: torch.Tensor) -> torch.Tensor:
        """Frequencies of each token, [T, D/2]; tokens with key 0 get the unscaled ones exactly."""
        spec = self.spec
        factor = float(spec.scaling.get("factor", 1.0))
        stretch = factor * keys.double() / spec.trained_len - (factor - 1.0)
        stretch = torch.where(keys == 0, torch.ones_like(stretch), stretch)
        return torch.where((keys == 0)[:, None], self.inv_freq, _ntk_frequencies(spec, stretch))


def ntk_doublings(length: int, trained_len: int) -> int:
    """How often ``trained_len`` must double to hold ``length``.

    Qwen v1's α is 2^(doublings + 1) − 1, and 1 without any.
    """
    doublings = 0
    while trained_len << doublings < length:
        doublings += 1
    return doublings


def _qwen_ntk_inv_freq_table(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Frequencies by number of doublings, [32, D/2]; the first row is the unscaled one exactly."""
    alpha = 2.0 ** (torch.arange(32, dtype=torch.float64, device="cpu") + 1) - 1
    table = _ntk_frequencies(spec, alpha)
    table[0] = inv_freq
    return table


def _longrope_inv_freq_table(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """LongRoPE's frequencies of short and of long sequences, [2, D/2] (arXiv:2402.13753)."""
    del plain
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim
    divisors = torch.tensor(
        [spec.scaling["short_factor"], spec.scaling["long_factor"]],
        dtype=torch.float32,
        device="cpu",
    )
    return 1.0 / (divisors * spec.base**exponent)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    """The factor on cos and sin that keeps the attention's entropy over longer contexts."""
    scaling = spec.scaling
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    ratio = float(scaling.get("factor") or spec.trained_len / trained)
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(trained))


def _ntk_frequencies(spec: RopeSpec, base_factor: torch.Tensor) -> torch.Tensor:
    """Frequencies of a base raised by ``base_factor`` [T] float64 (NTK): [T, D/2] float32."""
    base = spec.base * base_factor ** (spec.dim / (spec.dim - 2))
    exponent = (
        torch.arange(0, spec.dim, 2, device=base_factor.device, dtype=torch.float64) / spec.dim
    )
    return (base[:, None] ** -exponent).float()


def _length_independent_freqs_and_factor(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """(inv_freq [D/2] float32, factor on cos and sin) of a scaling that needs no length."""
    # on the CPU even in a model on the meta device: torch would load its compiler for that, 120 MB
    # of modules
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim
    plain = 1.0 / spec.base**exponent
    scaling_type, scaling = spec.scaling_type, spec.scaling
    if scaling_type in ("default", "dynamic", "qwen_ntk"):
        return plain, 1.0
    if scaling_type == "longrope":
        return plain, _longrope_attention_factor(spec)
    if scaling_type == "proportional":
        return _proportional_frequencies(plain, scaling), 1.0
    if scaling_type == "linear":
        return plain / float(scaling["factor"]), 1.0
    if scaling_type == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    if scaling_type == "yarn":
        return _yarn_frequencies_and_factor(spec, exponent)
    raise CheckpointError(
        f"rope scaling {scaling_type!r} is not supported (known: linear, dynamic, llama3, yarn, "
        "longrope)"
    )


def _proportional_frequencies(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Gemma 4: the slowest pairs do not turn; the others turn as if all did."""
    share = float(scaling.get("partial_rotary_factor") or 1.0)
    turning = int(share * 2 * len(plain) // 2)
    frequencies = plain / float(scaling.get("factor") or 1.0)
    frequencies[turning:] = 0.0
    return frequencies


def _llama3_frequencies(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves divided by the factor, short ones kept, a ramp between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    wave = 2 * math.pi / plain
    ramp = (trained / wave - low) / (high - low)
    mixed = (1 - ramp) * plain / factor + ramp * plain
    scaled = torch.where(wave > trained / low, plain / factor, mixed)
    return torch.where(wave < trained / high, plain, scaled)


def _yarn_frequencies_and_factor(
    spec: RopeSpec, exponent: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al.

    2023, arXiv:2309.00071): interpolate slow channels, keep fast ones, temper the attention.
    """
    scaling = spec.scaling
    trained = float(scaling.get("original_max_position_embeddings") or spec.trained_len)
    factor = float(scaling["factor"])
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def channel(turns: float) -> float:
        return spec.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = channel(fast), channel(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    # a range that the clamps turned round stays so, as in the original: nothing is interpolated
    # then
    span = high - low or 0.001
    channels = torch.arange(spec.dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((channels - low) / span).clamp(0, 1)
    frequency = spec.base**exponent
    inv_freq = ramp / (factor * frequency) + (1 - ramp) / frequency
    return inv_freq, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    attention_factor = scaling.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def temper(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return temper(float(mscale)) / temper(float(all_dim))
    return temper(1.0)

"""Error metrics between tensors, or between rows of logits, in float64 and safe against NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

INFINITE_ERROR = math.inf
MAX_GAIN_DEVIATION_SIGMAS = 4
"""Standard deviations of a matrix's gain that count as chance: 1 matrix of 16,000 has more."""
MAX_LOGITS_PER_BLOCK = 1 << 21
"""Logits that are in float64 at a time: 16 MiB per copy for any vocabulary and text length."""


@dataclass(frozen=True)
class ErrorMetrics:
    """Metrics of one comparison.

    Errors are infinite if a tensor has NaN or Inf, or the shapes differ. ``max_abs_expected``: max
    |reference|. ``max_rel``: max_abs / scale. ``rel_l2``: ‖ours − ref‖ / ‖ref‖. ``gain``: <ours,
    ref> / <ref, ref>, the factor between the two; rounding leaves it near 1. ``gain_std``: by
    how much the errors of a matrix of few weights move its gain, though they do not favour either
    direction (one standard deviation); 0 where it is not measured. ``output_gain``: of a quantized
    matrix the gain of its outputs (accept/output_gain.py), and ``output_gain_std`` its standard
    deviation, which is infinite where it is not measured.
    """

    name: str
    max_abs: float
    mean_abs: float
    median_abs: float
    max_rel: float
    rel_l2: float
    cosine: float
    gain: float
    scale: float
    gain_std: float = 0.0
    output_gain: float = 1.0
    output_gain_std: float = INFINITE_ERROR

    @property
    def is_finite(self) -> bool:
        """Return whether the tensors could be compared at all."""
        return math.isfinite(self.max_abs)


def incomparable_metrics(name: str) -> ErrorMetrics:
    """Return infinite errors, for tensors of different shapes, or with NaN or Inf."""
    return ErrorMetrics(
        name,
        INFINITE_ERROR,
        INFINITE_ERROR,
        INFINITE_ERROR,
        INFINITE_ERROR,
        INFINITE_ERROR,
        0.0,
        INFINITE_ERROR,
        INFINITE_ERROR,
    )


def compare_tensors(name: str, ours: Tensor, reference: Tensor) -> ErrorMetrics:
    """Compare two tensors of one shape on the device of ``reference``."""
    if ours.shape != reference.shape:
        return incomparable_metrics(name)
    right, left = (
        _to_float64(reference, reference).reshape(-1),
        _to_float64(ours, reference).reshape(-1),
    )
    if not right.numel():
        return ErrorMetrics(name, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    error = (left - right).abs()
    # max propagates NaN, and Inf on either side makes the difference Inf or NaN
    max_abs, scale = float(error.max()), float(right.abs().max())
    if not math.isfinite(max_abs):
        return incomparable_metrics(name)
    # Normalise first, so that squares of very large or very small values stay in range.
    unit = scale or float(left.abs().max()) or 1.0
    left, right, off = left / unit, right / unit, error / unit
    power, ours_power, product = float(right @ right), float(left @ left), float(left @ right)
    sums = _ErrorSums(power, ours_power, product, float(off.norm()))
    return _error_metrics_from_sums(
        name, max_abs, float(error.mean()), float(error.median()), scale, sums
    )


class _ErrorSums(NamedTuple):
    """Sums of normalised values: ‖ref‖², ‖ours‖², <ours, ref> and ‖ours − ref‖."""

    power: float
    ours_power: float
    product: float
    error_norm: float


def _error_metrics_from_sums(
    name: str, max_abs: float, mean_abs: float, median_abs: float, scale: float, sums: _ErrorSums
) -> ErrorMetrics:
    power, ours_power, product, off = sums
    same = max_abs == 0.0
    return ErrorMetrics(
        name,
        max_abs=max_abs,
        mean_abs=mean_abs,
        median_abs=median_abs,
        max_rel=0.0 if same else _ratio_or_infinity(max_abs, scale),
        rel_l2=0.0 if same else _ratio_or_infinity(off, math.sqrt(power)),
        cosine=1.0
        if same
        else (product / math.sqrt(power * ours_power) if power and ours_power else 0.0),
        gain=1.0 if same else _ratio_or_infinity(product, power),
        scale=scale,
    )


def _to_float64(tensor: Tensor, like: Tensor) -> Tensor:
    """Convert to float64 on the device of ``like``."""
    return tensor.detach().to(like.device).double()


def _ratio_or_infinity(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else INFINITE_ERROR


@dataclass(frozen=True)
class ConfidentTokenAgreement:
    """Next-token agreement where the reference is confident.

    ``first_mismatch`` is the first row that disagrees.
    """

    num_rows: int
    num_sure: int
    num_agreed: int
    first_mismatch: int | None

    @property
    def all_agree(self) -> bool:
        """Return whether all confident rows agree."""
        return self.num_agreed == self.num_sure


def center_logits(logits: Tensor) -> Tensor:
    """Return logits [T, vocab] in float64 minus each row's mean, which softmax ignores."""
    wide = _to_float64(logits, logits)
    return wide - wide.mean(-1, keepdim=True)


def _row_blocks(*logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few rows of each [T, vocab] tensor, until all rows are processed."""
    rows = _rows_per_block(logits[0])
    return zip(*(each.split(rows) for each in logits), strict=True)


def _rows_per_block(logits: Tensor) -> int:
    """Return the rows of a block."""
    return max(1, MAX_LOGITS_PER_BLOCK // max(1, logits.shape[-1]))


def compare_logits(name: str, ours: Tensor, reference: Tensor) -> ErrorMetrics:
    """Compare centred logits [T, vocab] as ``compare_tensors``, a block of rows at a time."""
    if ours.shape != reference.shape:
        return incomparable_metrics(name)
    if not reference.numel():
        return compare_tensors(name, ours, reference)
    errors = torch.empty_like(reference, dtype=torch.float32)
    max_abs = scale = ours_scale = total = 0.0
    for (left, right), error in zip(
        _centered_logit_blocks(ours, reference), _row_blocks(errors), strict=True
    ):
        block = (left - right).abs()
        if not bool(block.isfinite().all()):
            return incomparable_metrics(name)
        error[0].copy_(block)
        max_abs, total = max(max_abs, float(block.max())), total + float(block.sum())
        scale, ours_scale = (
            max(scale, float(right.abs().max())),
            max(ours_scale, float(left.abs().max())),
        )
    # Normalise first, so that squares of very large or very small values stay in range.
    unit = scale or ours_scale or 1.0
    power = ours_power = product = off = 0.0
    for left, right in _centered_logit_blocks(ours, reference):
        left, right = left.reshape(-1) / unit, right.reshape(-1) / unit
        power, ours_power = power + float(right @ right), ours_power + float(left @ left)
        product += float(left @ right)
        off += float((left - right).square().sum())
    mean_abs, median_abs = total / reference.numel(), float(errors.reshape(-1).median())
    return _error_metrics_from_sums(
        name,
        max_abs,
        mean_abs,
        median_abs,
        scale,
        _ErrorSums(power, ours_power, product, math.sqrt(off)),
    )


def _centered_logit_blocks(ours: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of centred rows of both, on the device of ``reference``."""
    for left, right in _row_blocks(ours, reference):
        yield center_logits(left.to(reference.device)), center_logits(right)


def confident_top1_agreement(
    ours: Tensor, reference: Tensor, margin: float
) -> ConfidentTokenAgreement:
    """Compare next tokens where the reference's top-two distance exceeds the margin.

    Args:
        ours: [T, vocab].
        reference: [T, vocab].
        margin: in units of each row's standard deviation over the vocabulary. A row of ours with
            NaN disagrees.
    """
    sure, same = [], []
    for left, right in _row_blocks(ours, reference):
        exact = center_logits(right)
        best = exact.topk(2, dim=-1)
        sure.append((best.values[:, 0] - best.values[:, 1]) > margin * exact.std(-1))
        wide = _to_float64(left, right)
        same.append((wide.argmax(-1) == best.indices[:, 0]) & wide.isfinite().all(-1))
    is_sure, agrees = torch.cat(sure), torch.cat(same)
    wrong = (is_sure & ~agrees).nonzero()
    first = int(wrong[0]) if len(wrong) else None
    return ConfidentTokenAgreement(
        len(is_sure), int(is_sure.sum()), int((is_sure & agrees).sum()), first
    )


def kl_divergence_per_row(ours: Tensor, reference: Tensor) -> Tensor:
    """Return KL(reference ‖ ours) in nats per row [T] of logits [T, vocab].

    It is infinite if a row of ours is not finite.
    """
    rows = []
    for left, right in _row_blocks(ours, reference):
        exact, guess = (
            _to_float64(right, right).log_softmax(-1),
            _to_float64(left, right).log_softmax(-1),
        )
        rows.append((exact.exp() * (exact - guess)).sum(-1).clamp(min=0.0))
    each = torch.cat(rows)
    return torch.where(each.isnan(), torch.full_like(each, INFINITE_ERROR), each)


def perplexity(logits: Tensor, targets: Tensor) -> float:
    """Return exp of the mean negative log likelihood of targets [T]; NaN becomes inf."""
    places = targets.to(logits.device, torch.long)[:, None]
    blocks = zip(
        logits.split(_rows_per_block(logits)), places.split(_rows_per_block(logits)), strict=True
    )
    rows = [-_to_float64(block, block).log_softmax(-1).gather(-1, place) for block, place in blocks]
    each = torch.cat(rows)
    mean = float(each.mean()) if each.numel() else 0.0
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else INFINITE_ERROR

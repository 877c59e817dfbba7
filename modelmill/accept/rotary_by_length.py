"""Checks a rotation that depends on a length, on both sides of the length at which it changes.

The sequences of acceptance are short: of a LongRoPE they would use one list of factors alone.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances import module_bound

ROTARY_MODULE = "rotary"


@runtime_checkable
class LengthDependentRotary(Protocol):
    """A rotation whose frequencies may depend on the prompt's length."""

    factor: float

    def frequencies_of_prompt(self, length: int) -> torch.Tensor:
        """The frequencies [D / 2] of a prompt of this length."""


def check_rotary_by_length(reference: ReferenceModel, model: Any) -> list[ToleranceCheckResult]:
    """Compare cosines and sines of the last position of prompts; empty for other rotations.

    The prompts: the longest that has the first frequencies, one token more, and a longer one.
    """
    expected, rotary = getattr(reference, "rope", None), getattr(model, "rotary", None)
    if not isinstance(expected, ReferenceRope) or not isinstance(rotary, LengthDependentRotary):
        return []
    last = expected.last_unscaled_length
    if last is None:
        return []
    longest = max(last + 2, expected.max_position, 2 * last)
    return [_compare_at_length(expected, rotary, length) for length in (last, last + 1, longest)]


def _compare_at_length(
    expected: ReferenceRope, rotary: LengthDependentRotary, length: int
) -> ToleranceCheckResult:
    right = expected.frequencies(1, length, torch.float32)[0]
    tables = (
        _last_position_cos_sin(rotary.frequencies_of_prompt(length).cpu().float(), length)
        * rotary.factor,
        _last_position_cos_sin(right, length) * expected.attention_factor(),
    )
    name = f"{ROTARY_MODULE} of {length} tokens"
    bound = module_bound("rotary", "float32", length=length)
    return ToleranceCheckResult(name, None, ROTARY_MODULE, compare_tensors(name, *tables), bound)


def _last_position_cos_sin(frequencies: torch.Tensor, length: int) -> torch.Tensor:
    """Cosines and sines of the last position, [1, D]."""
    angles = (length - 1) * frequencies[None]
    return torch.cat((angles.cos(), angles.sin()), 1)

"""The range of a kernel that rotates and stores keys and values as data; what its calls share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from modelmill.ops.kernel_support import KernelSupportRange
from modelmill.ops.operand_guards import (
    OPERAND_ALIGNMENT_BYTES,
    Guard,
    StepOperandValidator,
    make_weak_reference,
)

if TYPE_CHECKING:
    from modelmill.ops.declaration import OpDeclaration
    from modelmill.ops.rope_cache import RopeCacheInputs


class RopeCacheProblem(NamedTuple):
    """Sizes and dtypes of rows of q, k and v, and of the pages that keep them.

    Attributes:
        m: tokens; 0 if there are no values.
        dim: channels of a head.
        dtype: of the rows.
        page_dtypes: of keys and values.
        slot_dtype: of the slots.
        angle_dtypes: of cos, sin and the factors of q, of those that there are.
        norm_dtypes: of the weights of the norms of q and k, of those that there are.
        paired: whether cos and sin, and both norms, are there together or not at all.
        scaled: whether pages have scales.
        device: of the rows.
    """

    m: int
    dim: int
    dtype: torch.dtype
    page_dtypes: tuple[torch.dtype, torch.dtype]
    slot_dtype: torch.dtype
    angle_dtypes: tuple[torch.dtype, ...]
    norm_dtypes: tuple[torch.dtype, ...]
    paired: bool
    scaled: bool
    device: torch.device


def make_rope_cache_problem(qkv: torch.Tensor, inputs: RopeCacheInputs) -> RopeCacheProblem:
    """The problem of these operands."""
    k_cache, v_cache, slots, _, cos, sin, q_scale, q_norm, k_norm, _ = inputs[:10]
    k_scale, v_scale = inputs[10:]
    return RopeCacheProblem(
        qkv.shape[0] if qkv.numel() else 0,
        k_cache.shape[3],
        qkv.dtype,
        (k_cache.dtype, v_cache.dtype),
        slots.dtype,
        tuple(each.dtype for each in (cos, sin, q_scale) if each is not None),
        tuple(each.dtype for each in (q_norm, k_norm) if each is not None),
        (cos is None) is (sin is None) and (q_norm is None) is (k_norm is None),
        k_scale is not None and v_scale is not None,
        qkv.device,
    )


@dataclass(frozen=True, kw_only=True)
class RopeCacheSupportRange(KernelSupportRange):
    """Rows and pages that a kernel serves.

    Attributes:
        dtypes: of the rows; () means any.
        page_dtypes: of the pages; () means any.
        same_page_dtypes: whether keys and values must have one.
        scaled: whether pages must have scales, or must not; None: either.
        max_dim: channels of a head at most, an even number; 0: any number.
        plain_operands: whether slots must be int64, angles float32, norms of the rows' dtype and
            paired.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    page_dtypes: tuple[torch.dtype, ...] = ()
    same_page_dtypes: bool = False
    scaled: bool | None = None
    max_dim: int = 0
    plain_operands: bool = False

    def covers_ignoring_m(self, problem: RopeCacheProblem) -> bool:
        """Whether it serves these operands with some number of tokens in ``m``."""
        keys, values = problem.page_dtypes
        return (
            (not self.dtypes or problem.dtype in self.dtypes)
            and (not self.page_dtypes or keys in self.page_dtypes)
            and (keys is values or not self.same_page_dtypes)
            and self.scaled in (None, problem.scaled)
            and (not self.max_dim or (problem.dim <= self.max_dim and problem.dim % 2 == 0))
            and (not self.plain_operands or _has_standard_operand_dtypes(problem))
            and super().covers_ignoring_m(problem)
        )


def _has_standard_operand_dtypes(problem: RopeCacheProblem) -> bool:
    return (
        problem.paired
        and problem.slot_dtype is torch.int64
        and {torch.float32}.issuperset(problem.angle_dtypes)
        and {problem.dtype}.issuperset(problem.norm_dtypes)
    )


# slots; cos, sin and the factors of q
_SLOTS_AND_ANGLES_VALIDATOR = StepOperandValidator(
    (torch.int64, 1),
    (torch.float32, OPERAND_ALIGNMENT_BYTES),
    (torch.float32, OPERAND_ALIGNMENT_BYTES),
    (torch.float32, 1),
)


def make_rope_inputs_check(bound: RopeCacheInputs) -> Callable[[RopeCacheInputs], bool] | None:
    """Whether inputs have the bound pages and norms, and angles alike; None: they are not plain."""
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm, _ = bound[:10]
    present = _SLOTS_AND_ANGLES_VALIDATOR.present_flags_if_valid(slots, cos, sin, q_scale)
    if not present:
        return None
    keys, values = make_weak_reference(k_cache), make_weak_reference(v_cache)
    key_scales, value_scales = (
        make_weak_reference(bound.k_scale),
        make_weak_reference(bound.v_scale),
    )

    def is_alike(inputs: RopeCacheInputs) -> bool:
        return (
            inputs.k_cache is keys()
            and inputs.v_cache is values()
            and inputs.k_scale is key_scales()
            and inputs.v_scale is value_scales()
            and inputs.heads == heads
            and inputs.q_norm is q_norm
            and inputs.k_norm is k_norm
            and _SLOTS_AND_ANGLES_VALIDATOR.present_flags_if_valid(
                inputs.slots, inputs.cos, inputs.sin, inputs.q_scale
            )
            == present
        )

    return is_alike


def make_rope_guard(_: OpDeclaration, operands: Sequence[Any]) -> Guard | None:
    """The tokens of a call with these pages, and rows that lie in memory alike."""
    qkv, inputs = operands
    is_alike = make_rope_inputs_check(inputs)
    if is_alike is None or qkv.data_ptr() % OPERAND_ALIGNMENT_BYTES or not qkv.numel():
        return None
    dtype, inner, strides = qkv.dtype, qkv.shape[1:], qkv.stride()

    def rows_of(qkv: torch.Tensor, inputs: RopeCacheInputs) -> int | None:
        shape = qkv.shape
        if (
            not qkv.data_ptr() % OPERAND_ALIGNMENT_BYTES
            and qkv.dtype is dtype
            and shape[1:] == inner
            and qkv.stride() == strides
            and is_alike(inputs)
        ):
            return shape[0] or None
        return None

    return rows_of

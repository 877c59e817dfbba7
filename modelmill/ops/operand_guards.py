"""Guards: are the operands of a call like those that an op was bound for (``ops.bound_op``)?

What a choice depends on is compared by identity (weights) or as memory (dtype, strides, alignment):
the arguments of each call in every layer of every step. A guard returns the call's number of rows,
None if it is not alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from modelmill.ops.declaration import OpDeclaration

OPERAND_ALIGNMENT_BYTES = 16  # bytes; of operands that a binding serves
Guard = Callable[..., Any]


def make_gemm_guard(declaration: OpDeclaration, operands: Sequence[Any]) -> Guard | None:
    """The rows of a product with the weight of these operands; None if x is not served.

    The weight, the bias and the output's dtype must be the bound ones, x and the other operand of a
    call must lie in memory alike.
    """
    names = declaration.operand_names
    takes_inputs_only, bias_at = declaration.takes_inputs_only, names.index("bias")
    x, weight, bias = operands[0], operands[1], operands[bias_at]
    if x.dim() != 2 or x.stride() != (x.shape[1], 1) or x.data_ptr() % OPERAND_ALIGNMENT_BYTES:
        return None
    dtype, strides = x.dtype, x.stride()
    other_at = names.index(declaration.per_call) if declaration.per_call else 0
    out_dtype_at = names.index("dtype") if "dtype" in names else 0
    out_dtype = operands[out_dtype_at] if out_dtype_at else None
    alike = declaration.alike or make_layout_check
    is_alike = alike(operands[other_at]) if other_at else None
    if other_at and is_alike is None:
        return None

    def rows_of(*args: Any) -> int | None:
        operands = args[0] if takes_inputs_only else args
        x = operands[0]
        if (
            x.dtype is dtype
            and x.stride() == strides
            and not x.data_ptr() % OPERAND_ALIGNMENT_BYTES
            and operands[1] is weight
            and len(operands) > bias_at  # else the bias is left out, and None
            and operands[bias_at] is bias
            and (not out_dtype_at or operands[out_dtype_at] is out_dtype)
            and (is_alike is None or is_alike(operands[other_at]))
        ):
            return x.shape[0]
        return None

    return rows_of


def make_row_op_guard(declaration: OpDeclaration, operands: Sequence[Any]) -> Guard | None:
    """The rows of a call of a row-wise op: x first, then what it shares with other calls.

    x and the operand that each call has besides must lie in memory alike, all else but numbers must
    be the bound objects.
    """
    names, takes_inputs_only = declaration.operand_names, declaration.takes_inputs_only
    x = operands[0]
    other_at = names.index(declaration.per_call) if declaration.per_call else 0
    other = operands[other_at]
    if (
        x.dim() < 2
        or not x.is_contiguous()
        or x.data_ptr() % OPERAND_ALIGNMENT_BYTES
        or not x.numel()
    ):
        return None
    if (
        not other.is_contiguous()
        or other.data_ptr() % OPERAND_ALIGNMENT_BYTES
        or other.shape != x.shape
    ):
        return None
    dtype, inner, strides = x.dtype, x.shape[1:], x.stride()
    rows_each, other_dtype, count = prod(inner[:-1]), other.dtype, len(operands)
    is_same = _make_identity_check(operands, other_at)

    def rows_of(*args: Any) -> int | None:
        operands = args[0] if takes_inputs_only else args
        x = operands[0]
        shape = x.shape
        if (
            x.dtype is dtype
            and shape[1:] == inner
            and x.stride() == strides
            and not x.data_ptr() % OPERAND_ALIGNMENT_BYTES
            and len(operands) == count
            and (is_same is None or is_same(operands))
        ):
            if other_at:
                other = operands[other_at]
                if (
                    other.dtype is not other_dtype
                    or other.shape != shape
                    or not other.is_contiguous()
                    or other.data_ptr() % OPERAND_ALIGNMENT_BYTES
                ):
                    return None
            return shape[0] * rows_each or None
        return None

    return rows_of


def _make_identity_check(
    operands: Sequence[Any], other_at: int
) -> Callable[[Sequence[Any]], bool] | None:
    """Whether operands are the bound objects; numbers and those of each call are not compared.

    The parts of a spec are compared one by one: specs are made anew in each call.
    """
    places = [
        at
        for at, each in enumerate(operands)
        if at not in (0, other_at) and not isinstance(each, float)
    ]
    if not places:
        return None
    spec_at = places.pop() if hasattr(operands[places[-1]], "_fields") else 0
    spec = operands[spec_at] if spec_at else ()
    if not places:
        return lambda operands: all(map(is_, operands[spec_at], spec))
    if len(places) == 1:
        at, fixed = places[0], operands[places[0]]
        if not spec_at:
            return lambda operands: operands[at] is fixed
        return lambda operands: operands[at] is fixed and all(map(is_, operands[spec_at], spec))
    get = itemgetter(*places)
    bound = get(operands)
    assert not spec_at, "a spec stands beside a weight at most"
    return lambda operands: all(map(is_, get(operands), bound))


def make_layout_check(bound: Any) -> Callable[[Any], bool]:
    """Whether an operand is None, or of the dtype, packed and aligned, as the bound one is."""
    if bound is None:
        return lambda operand: operand is None
    dtype, contiguous = bound.dtype, bound.is_contiguous()
    aligned = not bound.data_ptr() % OPERAND_ALIGNMENT_BYTES
    return lambda operand: (
        operand is not None
        and operand.dtype is dtype
        and operand.is_contiguous() is contiguous
        and (not aligned or not operand.data_ptr() % OPERAND_ALIGNMENT_BYTES)
    )


def null_reference() -> None:
    """What stands in the place of a reference to an operand that is None."""


def make_weak_reference(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    """A weak reference: a binding does not keep the pages of a cache."""
    return null_reference if tensor is None else weakref.ref(tensor)


def _is_same_tensor(
    reference: Callable[[], torch.Tensor | None], tensor: torch.Tensor | None
) -> bool:
    return reference() is tensor


class StepOperandValidator:
    """Operands that all layers of a step share: looked at once, then known by identity.

    Attributes:
        dtypes: of each.
        alignments: of each, in bytes.
    """

    def __init__(self, *kinds: tuple[torch.dtype, int]) -> None:
        self.dtypes = tuple(dtype for dtype, _ in kinds)
        self.alignments = tuple(alignment for _, alignment in kinds)
        self._last: tuple[tuple[Callable[[], torch.Tensor | None], ...], tuple[bool, ...]] = (
            (),
            (),
        )

    def present_flags_if_valid(self, *tensors: torch.Tensor | None) -> tuple[bool, ...]:
        """Which are not None; () if one is not packed, aligned and of its dtype."""
        references, present = self._last
        if present and all(map(_is_same_tensor, references, tensors)):
            return present
        present = tuple(each is not None for each in tensors)
        for each, dtype, alignment in zip(tensors, self.dtypes, self.alignments, strict=True):
            if each is not None and not (
                each.dtype is dtype and each.is_contiguous() and not each.data_ptr() % alignment
            ):
                return ()
        self._last = (tuple(map(make_weak_reference, tensors)), present)
        return present

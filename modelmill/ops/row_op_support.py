"""The range of a row-wise kernel as data: norms, activation functions, quantization, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from modelmill.ops.kernel_support import KernelSupportRange
from modelmill.ops.quant_types import ActQuantSpec


class RowOpProblem(NamedTuple):
    """Sizes and dtypes of an op on rows x [..., H].

    Attributes:
        m: rows; 0 if x is empty, or its residual has another shape or dtype.
        width: H.
        dtype: of x.
        device: of x.
        dims: dimensions of x.
        on_gpu: whether x is on a GPU.
        operand_dtypes: of weight and bias, or of the parameters of each row.
        spec: how the output is quantized; None: it is not.
        group: columns that share a step of the quantized output; 0: a row or all have one.
        gated: whether a row is a gate and the values that it multiplies.
    """

    m: int
    width: int
    dtype: torch.dtype
    device: torch.device
    dims: int
    on_gpu: bool = False
    operand_dtypes: tuple[torch.dtype, ...] = ()
    spec: ActQuantSpec | None = None
    group: int = 0
    gated: bool = False

    @property
    def out_columns(self) -> int:
        """Columns of the quantized output."""
        order = None if self.spec is None else self.spec.perm
        return self.width if order is None else order.numel()


def make_row_op_problem(
    x: torch.Tensor,
    *operands: torch.Tensor,
    residual: torch.Tensor | None = None,
    spec: ActQuantSpec | None = None,
    group: int = 0,
    gated: bool = False,
) -> RowOpProblem:
    """The problem of these operands."""
    shape = x.shape
    alike = residual is None or (residual.shape == shape and residual.dtype is x.dtype)
    return RowOpProblem(
        prod(shape[:-1]) if alike and x.numel() else 0,
        shape[-1] if shape else 0,
        x.dtype,
        x.device,
        len(shape),
        x.is_cuda,
        tuple([each.dtype for each in operands]),
        spec,
        group,
        gated,
    )


def make_quantized_row_op_problem(
    x: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> RowOpProblem:
    """The problem of an op with an 8-bit output, scaled by one factor or by row."""
    return make_row_op_problem(x, spec=ActQuantSpec(dtype, inv_scale))


@dataclass(frozen=True, kw_only=True)
class RowOpSupportRange(KernelSupportRange):
    """Rows that a kernel serves.

    Attributes:
        on_gpu: whether x must be on a GPU.
        dtypes: of x; () means any.
        same_dtype: whether all operands have x's dtype.
        operand_dtypes: of each operand; () means any.
        dims: least and largest number of dimensions of x.
        max_width: columns of x and of the output at most.
        width_multiple: both are a multiple of it.
        out_dtypes: of the quantized output; () means any.
        max_factors: static factors at most: 1 is one for all columns.
        packed_dtypes: whether factors must be float32, zero-points and permutations int32.
        plain_spec: whether the quantized output must be of 8 bits, in order, without zero-points.
        permuted: whether a permutation must be given.
    """

    on_gpu: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    same_dtype: bool = False
    operand_dtypes: tuple[torch.dtype, ...] = ()
    dims: tuple[int, int] = (1, 16)
    max_width: int = 1 << 31
    width_multiple: int = 1
    out_dtypes: tuple[torch.dtype, ...] = ()
    max_factors: int = 1 << 31
    packed_dtypes: bool = False
    plain_spec: bool = False
    permuted: bool = False

    def covers_ignoring_m(self, problem: RowOpProblem) -> bool:
        """Whether it serves these operands with some number of rows in ``m``."""
        widest = max(problem.width, problem.out_columns)
        return (
            self.on_gpu <= problem.on_gpu
            and self.dims[0] <= problem.dims <= self.dims[1]
            and (not self.dtypes or problem.dtype in self.dtypes)
            and (not self.same_dtype or {problem.dtype}.issuperset(problem.operand_dtypes))
            and self.operand_dtypes in ((), problem.operand_dtypes)
            and widest <= self.max_width
            and problem.width % self.width_multiple == 0
            and problem.out_columns % self.width_multiple == 0
            and (problem.spec is None or self._covers_spec(problem.spec))
            and super().covers_ignoring_m(problem)
        )

    def _covers_spec(self, spec: ActQuantSpec) -> bool:
        dtype, inv_scale, zero_point, perm, bits = spec
        is_plain = zero_point is None and perm is None and bits == 8
        return (
            (not self.out_dtypes or dtype in self.out_dtypes)
            and (inv_scale is None or 0 < inv_scale.numel() <= self.max_factors)
            and (not self.packed_dtypes or _has_kernel_spec_dtypes(spec))
            and (is_plain or not self.plain_spec)
            and (perm is not None or not self.permuted)
        )


def has_contiguous_tensors(spec: ActQuantSpec) -> bool:
    """Whether factors, zero-points and permutation are contiguous."""
    return all(each is None or each.is_contiguous() for each in spec[1:4])


def _has_kernel_spec_dtypes(spec: ActQuantSpec) -> bool:
    """Whether factors, zero-points and permutation have the dtypes that kernels read."""
    dtypes = (torch.float32, torch.int32, torch.int32)
    return all(
        each is None or each.dtype is dtype for each, dtype in zip(spec[1:4], dtypes, strict=True)
    )

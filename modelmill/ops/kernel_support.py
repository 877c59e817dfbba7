"""The range of a kernel as data: sizes, dtypes and groups that it serves; here those of GEMMs.

An implementation of an op puts its ``SUPPORTED_PROBLEMS`` beside its kernels; they decide which
backend serves a product. Where it consists of several kernels, its ``KERNELS`` are ranges with
functions: the first that covers the product computes it. What depends on memory (strides,
alignment) is not a size; that is the implementation's ``supports``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

UNBOUNDED = 1 << 62
HALF_DTYPES = (torch.float16, torch.bfloat16)
HALF_AND_FLOAT32_DTYPES = (*HALF_DTYPES, torch.float32)
HALF_AND_FLOAT64_DTYPES = (*HALF_DTYPES, torch.float64)


class GemmProblem(NamedTuple):
    """Sizes and dtypes of a product x [M, K] · weight [N, K]ᵀ.

    Attributes:
        m: rows of x; 0 if x is no matrix.
        n: rows of the weight.
        k: columns of x.
        dtype: of x.
        weight_dtype: of the stored weight.
        out_dtype: of the output.
        group: columns that share a scale; 0 where there are no groups.
        groups: scales of a row of the weight; 0 where it has none.
        scale_dtype: of the weight's scales, or None.
        offset: whether the groups have offsets.
        bias: whether there is a bias.
        device: index of the GPU; −1 on the CPU.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    group: int = 0
    groups: int = 0
    scale_dtype: torch.dtype | None = None
    offset: bool = False
    bias: bool = False
    device: int = -1


def make_gemm_problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    group: int = 0,
    offset: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> GemmProblem:
    """The product of these operands."""
    rows = weight.shape[0]
    return GemmProblem(
        x.shape[0] if x.dim() == 2 else 0,
        rows,
        x.shape[-1],
        x.dtype,
        weight.dtype,
        out_dtype or x.dtype,
        group,
        scale.numel() // max(rows, 1) if scale is not None else 0,
        None if scale is None else scale.dtype,
        offset is not None,
        bias is not None,
        x.get_device(),
    )


def make_dense_gemm_problem(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> GemmProblem:
    """The product of unquantized operands."""
    return make_gemm_problem(x, weight, bias=bias)


@dataclass(frozen=True, kw_only=True)
class KernelSupportRange:
    """Problems that a kernel serves, and is the fastest for; a family of ops adds its own fields.

    A problem is a NamedTuple of sizes and dtypes, ``m`` its number of rows.

    Attributes:
        m: least and largest number of rows of x.
        fits: a further condition (shared memory, kernel configs); it does not depend on the number
            of rows within ``m``.
        faster: a measured condition that depends on the exact number of rows.
    """

    m: tuple[int, int] = (1, UNBOUNDED)
    fits: Callable[[Any], bool] | None = None
    faster: Callable[[Any], bool] | None = None

    def covers(self, problem: Any) -> bool:
        """Whether the kernel serves this problem."""
        return (
            self.m[0] <= problem.m <= self.m[1]
            and self.covers_ignoring_m(problem)
            and (self.faster is None or self.faster(problem))
        )

    def covers_ignoring_m(self, problem: Any) -> bool:
        """Whether it serves this problem with some number of rows in ``m``."""
        return self.fits is None or self.fits(problem)


@dataclass(frozen=True, kw_only=True)
class GemmSupportRange(KernelSupportRange):
    """Products that a kernel serves.

    Attributes:
        n_multiple: N is a multiple of it.
        k_multiple: K is a multiple of it.
        dtypes: of x; () means any.
        weight_dtypes: () means any.
        out_dtypes: () means any.
        scale_dtypes: () means any.
        group_multiple: groups are a multiple of so many columns.
        bias: whether there must be (True) or must not be (False) a bias; None: either.
        min_weight_bytes: the weight has at least so many bytes.
    """

    n_multiple: int = 1
    k_multiple: int = 1
    dtypes: tuple[torch.dtype, ...] = ()
    weight_dtypes: tuple[torch.dtype, ...] = ()
    out_dtypes: tuple[torch.dtype, ...] = ()
    scale_dtypes: tuple[torch.dtype, ...] = ()
    group_multiple: int = 1
    bias: bool | None = None
    min_weight_bytes: int = 0

    def covers_ignoring_m(self, problem: GemmProblem) -> bool:
        """Whether it serves this weight with some number of rows in ``m``."""
        choices = (
            (self.dtypes, problem.dtype),
            (self.weight_dtypes, problem.weight_dtype),
            (self.out_dtypes, problem.out_dtype),
            (self.scale_dtypes, problem.scale_dtype),
        )
        return (
            problem.n % self.n_multiple == 0
            and problem.k % self.k_multiple == 0
            and problem.group % self.group_multiple == 0
            and all(not allowed or dtype in allowed for allowed, dtype in choices)
            and self.bias in (None, problem.bias)
            and problem.n * problem.k * problem.weight_dtype.itemsize >= self.min_weight_bytes
            and super().covers_ignoring_m(problem)
        )


class Kernel(NamedTuple):
    """One of the kernels of an implementation.

    Attributes:
        range: problems that it serves.
        run: computes the op; its arguments are those of the op.
        supports: a condition on the operands' memory beyond the implementation's, or None.
    """

    range: KernelSupportRange
    run: Callable[..., Any]
    supports: Callable[..., bool] | None = None


def select_first_kernel(
    kernels: Sequence[Kernel], problem: Any, *args: Any
) -> Callable[..., Any] | None:
    """The function of the first kernel that serves the product of these arguments, or None."""
    for kernel in kernels:
        if kernel.range.covers(problem) and (kernel.supports is None or kernel.supports(*args)):
            return kernel.run
    return None

"""GEMM ops bound to a weight: the implementation for each class of row counts is chosen once.

``GemmOp`` is what the registry selects for an op with implementations: called, it tries each one
in order of preference. ``bind`` does so once for a weight: the row counts fall into the classes
that the implementations' ranges (``ops.kernel_range``) make, each with the function that serves it,
so that a step's call goes directly to the kernel. The choice is the same for all arguments; those
whose memory differs from that of the bound ones (another alignment, other strides) are checked
one by one, as without a binding.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_range import UNBOUNDED, GemmProblem, Kernel, ProblemRange, first_kernel

Run = Callable[..., Any]
MAX_MEASURED_ROWS = 512  # row counts whose measured condition is remembered for each weight
ALIGNMENT = 16  # bytes; of operands that a binding serves


@dataclass(frozen=True)
class Implementation:
    """One backend's implementation of a GEMM op.

    Attributes:
        run: computes the op, with the device's launch configs.
        supports: whether the operands' memory is as the kernels need it.
        ranges: products that it serves; () means all.
        kernels: its kernels in order of preference; () means that ``run`` is the only one.
    """

    run: Run
    supports: Callable[..., bool] | None = None
    ranges: tuple[ProblemRange, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    @classmethod
    def of_module(cls, module: ModuleType, run: Run) -> Implementation:
        """The implementation in a backend's file; ``run``: its function with launch configs."""
        return cls(
            run,
            getattr(module, "supports", None),
            getattr(module, "SUPPORTED_PROBLEMS", ()),
            getattr(module, "KERNELS", ()),
        )

    def select(self, problem: GemmProblem, *args: Any) -> Run | None:
        """The function that computes the op of these arguments, or None if they are not served."""
        covered = not self.ranges or any(each.covers(problem) for each in self.ranges)
        if not covered or (self.supports is not None and not self.supports(*args)):
            return None
        return first_kernel(self.kernels, problem, *args) or self.run

    def bind(self, *args: Any) -> Implementation | None:
        """The same without the conditions on memory, which these arguments settle."""
        if self.supports is not None and not self.supports(*args):
            return None
        kernels = tuple(
            kernel._replace(supports=None)
            for kernel in self.kernels
            if kernel.supports is None or kernel.supports(*args)
        )
        return replace(self, supports=None, kernels=kernels)

    def with_hook(self, hook: Callable[[Run], Run]) -> Implementation:
        """The same with ``hook`` around each function."""
        kernels = tuple(kernel._replace(run=hook(kernel.run)) for kernel in self.kernels)
        return replace(self, run=hook(self.run), kernels=kernels)


class GemmOp:
    """A GEMM op on a device: its implementations in order of preference.

    Attributes:
        name: of the op.
        declaration: of the op.
        implementations: those that can run on the device.
        fallback: what serves all other arguments.
    """

    def __init__(
        self,
        name: str,
        declaration: OpDeclaration,
        implementations: Sequence[Implementation],
        fallback: Run,
    ) -> None:
        self.name, self.declaration = name, declaration
        self.implementations, self.fallback = tuple(implementations), fallback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op with the first implementation that serves the arguments."""
        if kwargs:
            args = self.declaration.positional(args, kwargs)
        return self.select(*args)(*args)

    def select(self, *args: Any) -> Run:
        """The function that computes the op of these arguments."""
        problem = self.declaration.problem_of(*args)
        for implementation in self.implementations:
            run = implementation.select(problem, *args)
            if run is not None:
                return run
        return self.fallback

    def bind(self, *args: Any) -> BoundGemm | None:
        """The op for the weight of these arguments, or None if a binding does not serve them."""
        if not _is_plain(self.declaration.operands_of(*args)[0]):
            return None
        bound = (each.bind(*args) for each in self.implementations)
        return BoundGemm(self, args, [each for each in bound if each is not None])

    def with_hook(self, hook: Callable[[Run], Run]) -> GemmOp:
        """The same op with ``hook`` around each function that may compute it."""
        wrapped = [each.with_hook(hook) for each in self.implementations]
        return GemmOp(self.name, self.declaration, wrapped, hook(self.fallback))


class RowChoice:
    """Which function computes the product of a weight with so many rows.

    Attributes:
        edges: the last row count of each class, in order.
        runs: the function of each class; None where it depends on the exact number of rows.
    """

    def __init__(
        self, problem: GemmProblem, implementations: Sequence[Implementation], fallback: Run
    ) -> None:
        self._problem, self._fallback = problem, fallback
        self._implementations = [each for each in implementations if _covers_weight(each, problem)]
        self._measured: dict[int, Run] = {}
        self.edges = row_classes(self._implementations)
        self.runs = tuple(self._bind_class(edge) for edge in self.edges)

    def select(self, rows: int) -> Run:
        """The function for so many rows."""
        return self.runs[bisect_left(self.edges, rows)] or self.for_exact_rows(rows)

    def _bind_class(self, edge: int) -> Run | None:
        """The function of the class that ends at ``edge``; None if the exact count decides."""
        problem = self._problem._replace(m=edge)
        for implementation in self._implementations:
            within = [each for each in implementation.ranges if each.m[0] <= edge <= each.m[1]]
            if any(each.faster is not None and each.covers_weight(problem) for each in within):
                return None
            run = implementation.select(problem)
            if run is not None:
                return run
        return self._fallback

    def for_exact_rows(self, rows: int) -> Run:
        """The function where the exact number of rows decides; computed once for each."""
        run = self._measured.get(rows)
        if run is None:
            problem = self._problem._replace(m=rows)
            chosen = (each.select(problem) for each in self._implementations)
            run = next((each for each in chosen if each is not None), self._fallback)
            if len(self._measured) >= MAX_MEASURED_ROWS:
                self._measured.clear()
            self._measured[rows] = run
        return run


class BoundGemm:
    """A GEMM op for one weight.

    Attributes:
        op: the op that was bound.
        choice: the functions by rows.
        call: called as the op is, runs the function of the row count's class. It holds the weight
            and the bias, and nothing that refers to it: a weight that is dropped is freed at once.
    """

    def __init__(
        self, op: GemmOp, args: Sequence[Any], implementations: Sequence[Implementation]
    ) -> None:
        self.op = op
        self.choice = RowChoice(op.declaration.problem_of(*args), implementations, op.fallback)
        self.call = _bind_call(op, self.choice, op.declaration.operands_of(*args))


def _bind_call(op: GemmOp, choice: RowChoice, operands: Sequence[Any]) -> Run:
    """The function of a step's call; what it compares are local names, as it is called often.

    The weight, the bias and the output's dtype must be the bound ones, x and the other operand of a
    call must lie in memory alike. Else the op decides for this call.
    """
    edges, runs, for_exact_rows = choice.edges, choice.runs, choice.for_exact_rows
    declaration, names = op.declaration, op.declaration.operand_names
    takes_inputs, bias_at = declaration.inputs is not None, names.index("bias")
    x, weight, bias = operands[0], operands[1], operands[bias_at]
    dtype, strides = x.dtype, x.stride()
    other_at = names.index(declaration.per_call) if declaration.per_call else 0
    out_dtype_at = names.index("dtype") if "dtype" in names else 0
    out_dtype = operands[out_dtype_at] if out_dtype_at else None
    is_alike = _layout_check(operands[other_at])

    def call(*args: Any) -> Any:
        operands = args[0] if takes_inputs else args
        x = operands[0]
        if (
            x.dtype is dtype
            and x.stride() == strides
            and not x.data_ptr() % ALIGNMENT
            and operands[1] is weight
            and len(operands) > bias_at  # else the bias is left out, and None
            and operands[bias_at] is bias
            and (not out_dtype_at or operands[out_dtype_at] is out_dtype)
            and (not other_at or is_alike(operands[other_at]))
        ):
            rows = x.shape[0]
            run = runs[bisect_left(edges, rows)] or for_exact_rows(rows)
            return run(*args)
        return op(*args)

    return call


def run_first(kernels: Sequence[Kernel], declaration: OpDeclaration) -> Run:
    """The ``run`` of an implementation of several kernels: the first that serves the product.

    Args:
        kernels: the last serves all that the implementation does.
        declaration: of the op.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = declaration.positional(args, kwargs)
        kernel = first_kernel(kernels, declaration.problem_of(*args), *args)
        assert kernel is not None, "see SUPPORTED_PROBLEMS"
        return kernel(*args)

    return run


def row_classes(implementations: Sequence[Implementation]) -> tuple[int, ...]:
    """The last row count of each class that the implementations' ranges make."""
    edges = {0, UNBOUNDED}
    for implementation in implementations:
        for each in (*implementation.ranges, *(kernel.range for kernel in implementation.kernels)):
            edges |= {each.m[0] - 1, each.m[1]}
    return tuple(sorted(edges))


def hooked(bound: Mapping[str, Run | None], hook: Callable[[Run], Run]) -> dict[str, Run]:
    """Selected ops with ``hook`` around each function that may compute them."""
    return {
        name: run.with_hook(hook) if isinstance(run, GemmOp) else hook(run)
        for name, run in bound.items()
        if callable(run)
    }


def call_after(run: Run, after: Callable[[], None]) -> Run:
    """``run``, then ``after``."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        after()
        return result

    return call


def _covers_weight(implementation: Implementation, problem: GemmProblem) -> bool:
    """Whether one of its ranges serves the weight with some number of rows."""
    ranges = implementation.ranges
    return not ranges or any(each.covers_weight(problem._replace(m=each.m[0])) for each in ranges)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x [M, K] is packed, also if it is one row of a wider matrix, and aligned."""
    return x.dim() == 2 and x.stride() == (x.shape[1], 1) and not x.data_ptr() % ALIGNMENT


def _layout_check(bound: torch.Tensor | None) -> Callable[[torch.Tensor | None], bool]:
    """Whether an operand is None, or of the dtype, packed and aligned, as the bound one is."""
    if bound is None:
        return lambda operand: operand is None
    dtype, contiguous = bound.dtype, bound.is_contiguous()
    aligned = not bound.data_ptr() % ALIGNMENT
    return lambda operand: (
        operand is not None
        and operand.dtype is dtype
        and operand.is_contiguous() is contiguous
        and (not aligned or not operand.data_ptr() % ALIGNMENT)
    )

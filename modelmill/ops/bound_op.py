"""Ops bound to their operands: the implementation for each class of row counts is chosen once.

``SelectedOp`` is what the registry selects for an op with implementations: called, it tries each
one in order of preference. ``bind`` does so once for a weight: the row counts fall into the classes
that the implementations' ranges (``ops.kernel_support``) make, each with the function for it,
so that a step's call goes directly to the kernel. The choice is the same for all arguments; those
that differ from the bound ones (another weight, alignment or strides) are checked one by one, as
without a binding.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import UNBOUNDED, Kernel, KernelSupportRange, select_first_kernel
from modelmill.ops.operand_guards import Guard

Run = Callable[..., Any]
MAX_REMEMBERED_ROW_COUNTS = 512  # row counts whose measured condition is remembered for each weight


@dataclass(frozen=True)
class OpImplementation:
    """One backend's implementation of an op.

    Attributes:
        run: computes the op, with the device's launch configs.
        supports: whether the operands' memory is as the kernels need it.
        ranges: problems that it serves; () means all.
        kernels: its kernels in order of preference; () means that ``run`` is the only one.
    """

    run: Run
    supports: Callable[..., bool] | None = None
    ranges: tuple[KernelSupportRange, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    @classmethod
    def from_backend_module(cls, module: ModuleType, run: Run) -> OpImplementation:
        """The implementation in a backend's file; ``run``: its function with launch configs."""
        return cls(
            run,
            getattr(module, "supports", None),
            getattr(module, "SUPPORTED_PROBLEMS", ()),
            getattr(module, "KERNELS", ()),
        )

    def select_function(self, problem: Any, *args: Any) -> Run | None:
        """The function that computes the op of these arguments, or None if they are not served."""
        covered = not self.ranges or any(each.covers(problem) for each in self.ranges)
        if not covered or (self.supports is not None and not self.supports(*args)):
            return None
        return select_first_kernel(self.kernels, problem, *args) if self.kernels else self.run

    def drop_passed_layout_checks(self, *args: Any) -> OpImplementation | None:
        """The same without the conditions on memory, which these arguments settle."""
        if self.supports is not None and not self.supports(*args):
            return None
        kernels = tuple(
            kernel._replace(supports=None)
            for kernel in self.kernels
            if kernel.supports is None or kernel.supports(*args)
        )
        if self.kernels and not kernels:
            return None
        return replace(self, supports=None, kernels=kernels)


class SelectedOp:
    """An op on a device: its implementations in order of preference.

    Attributes:
        name: of the op.
        declaration: of the op.
        implementations: those that can run on the device.
        fallback: what serves all other arguments.
        hook: what is put around each function that computes the op, or None.
    """

    def __init__(
        self,
        name: str,
        declaration: OpDeclaration,
        implementations: Sequence[OpImplementation],
        fallback: Run,
        hook: Callable[[Run], Run] | None = None,
    ) -> None:
        self.name, self.declaration = name, declaration
        self.implementations, self.fallback = tuple(implementations), fallback
        self.hook = hook
        self._hooked: dict[Run, Run] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op with the first implementation that serves the arguments."""
        if kwargs:
            args = self.declaration.to_positional_args(args, kwargs)
        return self.select_function(*args)(*args)

    def select_function(self, *args: Any) -> Run:
        """The function that computes the op of these arguments."""
        problem = self.declaration.make_problem(*args)
        return self.select_among_implementations(self.implementations, problem, *args)

    def select_among_implementations(
        self, implementations: Sequence[OpImplementation], problem: Any, *args: Any
    ) -> Run:
        """The same for a problem; without ``args``, their memory is not looked at."""
        declared = self.declaration
        if declared.split is not None and (parts := declared.split(problem)):
            runs = [_select_first_supported(implementations, part, *args) for part in parts]
            if None not in runs:
                assert declared.join is not None, "an op that is split is joined"
                return self._with_hook(declared.join(*runs))
        run = _select_first_supported(implementations, problem, *args)
        return self._with_hook(self.fallback if run is None else run)

    def bind(self, *args: Any) -> BoundOp | None:
        """The op for operands like these, or None if a binding does not serve them."""
        declared = self.declaration
        if declared.guard is None:
            return None
        guard = declared.guard(declared, declared.flatten_operands(*args))
        if guard is None:
            return None
        bound = (each.drop_passed_layout_checks(*args) for each in self.implementations)
        problem = declared.make_problem(*args)
        return BoundOp(self, guard, problem, [each for each in bound if each is not None])

    def with_hook(self, hook: Callable[[Run], Run]) -> SelectedOp:
        """The same op with ``hook`` around each function that may compute it."""
        own = self.hook
        both = hook if own is None else lambda run: hook(own(run))
        return SelectedOp(self.name, self.declaration, self.implementations, self.fallback, both)

    def _with_hook(self, run: Run) -> Run:
        """``run`` in the hook, the same each time."""
        if self.hook is None:
            return run
        if run not in self._hooked:
            self._hooked[run] = self.hook(run)
        return self._hooked[run]


def _select_first_supported(
    implementations: Sequence[OpImplementation], problem: Any, *args: Any
) -> Run | None:
    """The function of the first implementation that serves the problem of these arguments."""
    chosen = (each.select_function(problem, *args) for each in implementations)
    return next((each for each in chosen if each is not None), None)


class RowCountDispatch:
    """Which function computes the op of the bound operands with so many rows.

    Attributes:
        edges: the last row count of each class, in order.
        runs: the function of each class; None where it depends on the exact number of rows.
    """

    def __init__(
        self, op: SelectedOp, problem: Any, implementations: Sequence[OpImplementation]
    ) -> None:
        self._op, self._problem = op, problem
        self._implementations = [
            each for each in implementations if _covers_ignoring_m(each, problem)
        ]
        self._measured: dict[int, Run] = {}
        self.edges = bucket_edges_for_count("m", self._implementations)
        self.runs = tuple(self._select_for_bucket(edge) for edge in self.edges)

    def select_function(self, rows: int) -> Run:
        """The function for so many rows."""
        return self.runs[bisect_left(self.edges, rows)] or self.select_for_exact_rows(rows)

    def _select_for_bucket(self, edge: int) -> Run | None:
        """The function of the class that ends at ``edge``; None if the exact count decides."""
        problem = self._problem._replace(m=edge)
        for implementation in self._implementations:
            within = [each for each in implementation.ranges if each.m[0] <= edge <= each.m[1]]
            if any(each.faster is not None and each.covers_ignoring_m(problem) for each in within):
                return None
            if implementation.select_function(problem) is not None:
                break
        return self._op.select_among_implementations(self._implementations, problem)

    def select_for_exact_rows(self, rows: int) -> Run:
        """The function where the exact number of rows decides; computed once for each."""
        run = self._measured.get(rows)
        if run is None:
            problem = self._problem._replace(m=rows)
            run = self._op.select_among_implementations(self._implementations, problem)
            if len(self._measured) >= MAX_REMEMBERED_ROW_COUNTS:
                self._measured.clear()
            self._measured[rows] = run
        return run


class MultiCountDispatch:
    """Which function computes the op of the bound operands with these counts, of several kinds."""

    def __init__(
        self, op: SelectedOp, problem: Any, implementations: Sequence[OpImplementation]
    ) -> None:
        self._op, self._problem = op, problem
        self._implementations = tuple(implementations)
        # 1: where a step changes its kind
        self._edges = tuple(
            tuple(sorted({1, *bucket_edges_for_count(each, implementations)}))
            for each in op.declaration.counts
        )
        self._runs: dict[tuple[int, ...], Run] = {}

    def select_function(self, counts: Sequence[int]) -> Run:
        """The function for these counts; all of a class have the same."""
        key = tuple(map(bisect_left, self._edges, counts))
        run = self._runs.get(key)
        if run is None:
            problem = self._problem.with_step_counts(*counts)
            run = self._op.select_among_implementations(self._implementations, problem)
            self._runs[key] = run
        return run


class BoundOp:
    """An op for one weight, or for what else its calls share.

    Attributes:
        op: the op that was bound.
        guard: the row count of a call's arguments; None if they are not like the bound ones. It
            holds the weight and the bias, and nothing that refers to it: a weight that is dropped
            is freed at once.
        choice: the functions by rows.
    """

    def __init__(
        self,
        op: SelectedOp,
        guard: Guard,
        problem: Any,
        implementations: Sequence[OpImplementation],
    ) -> None:
        self.op, self.guard = op, guard
        kind = RowCountDispatch if len(op.declaration.counts) == 1 else MultiCountDispatch
        self.choice: RowCountDispatch | MultiCountDispatch = kind(op, problem, implementations)

    def call(self, *args: Any) -> Any:
        """Run the op; where the arguments are not like the bound ones it decides for this call."""
        rows = self.guard(*args)
        return self.op(*args) if rows is None else self.choice.select_function(rows)(*args)


class CachedOpBinding:
    """What a module keeps of an op that it calls in each step: the op bound to its operands.

    It is bound in the first call, and again for another op or weight. A copy binds its own.
    """

    def __init__(self) -> None:
        self._bound: BoundOp | None = None

    def __call__(self, op: Run, *args: Any) -> Any:
        """Run one of the device's ``Ops``."""
        bound = self._bound
        if bound is not None and bound.op is op:
            rows = bound.guard(*args)
            if rows is not None:
                return bound.choice.select_function(rows)(*args)
        if isinstance(op, SelectedOp):
            bound = op.bind(*args)
            if bound is not None:
                self._bound = bound
        return op(*args)

    def __reduce__(self) -> tuple[type[CachedOpBinding], tuple[()]]:
        """A copy is empty."""
        return CachedOpBinding, ()


def make_kernel_dispatcher(kernels: Sequence[Kernel], declaration: OpDeclaration) -> Run:
    """The ``run`` of an implementation of several kernels: the first that serves the problem.

    Args:
        kernels: together they serve all that the implementation does.
        declaration: of the op.
    """

    def not_served(*_: Any) -> Any:
        raise AssertionError("see SUPPORTED_PROBLEMS")

    return SelectedOp(
        "", declaration, [OpImplementation(not_served, kernels=tuple(kernels))], not_served
    )


def bucket_edges_for_count(
    count: str, implementations: Sequence[OpImplementation]
) -> tuple[int, ...]:
    """The last value in each class that the implementations' ranges make of a count."""
    edges = {0, UNBOUNDED}
    for implementation in implementations:
        for each in (*implementation.ranges, *(kernel.range for kernel in implementation.kernels)):
            least, most = getattr(each, count)
            edges |= {least - 1, most}
    return tuple(sorted(edges))


def hook_all_ops(bound: Mapping[str, Run | None], hook: Callable[[Run], Run]) -> dict[str, Run]:
    """Selected ops with ``hook`` around each function that may compute them."""
    return {
        name: run.with_hook(hook) if isinstance(run, SelectedOp) else hook(run)
        for name, run in bound.items()
        if callable(run)
    }


def wrap_with_after_call(run: Run, after: Callable[[], None]) -> Run:
    """``run``, then ``after``."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        after()
        return result

    return call


def _covers_ignoring_m(implementation: OpImplementation, problem: Any) -> bool:
    """Whether one of its ranges serves the weight with some number of rows."""
    ranges = implementation.ranges
    return not ranges or any(
        each.covers_ignoring_m(problem._replace(m=each.m[0])) for each in ranges
    )

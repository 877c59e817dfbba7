"""The declaration that makes a file of this folder an op (see ``registry``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.ops.op_cost import CostFunction, read_write_cost
from modelmill.ops.operand_guards import Guard, make_gemm_guard


@dataclass(frozen=True)
class OpDeclaration:
    """What the registry must know of an op; its file holds one, named ``DECLARATION``.

    Attributes:
        fuses: the ops that a fused op replaces, the one that names its backend first; () for any
            other op. A fused op is used only if all ops that it replaces come from its own backend
            (or from another one where its backend does not implement them), so that a backend
            chosen by the user for one op is never bypassed. A backend may have a fused op alone.
        optional: whether a fused op returns None for unsupported arguments: calling the ops that it
            replaces is then faster than running its reference.
        inputs: of an op with many arguments the NamedTuple that holds them, which its functions
            take as one argument; it stands in the reference's file. A frozen dataclass says the
            same but takes five times as long to make (7.5 us for 12 fields, not 1.6), and one is
            made in every layer of every step.
        inputs_name: name of that argument.
        problem: makes the problem of the operands (x first), by which kernels are chosen and bound
            (``ops.bound_op``): a ``GemmProblem``, ``RowOpProblem`` or the like.
        operands: the names of the op's arguments; () where they are its ``inputs`` alone.
        per_call: name of the operand that is another one in each call, beside x.
        guard: makes the function that says the rows of a call like the bound one
            (``ops.operand_guards``); None: the op is not bound.
        alike: makes the check of the operand ``per_call``; None: it must lie in memory alike.
        counts: fields of the problem that differ from call to call and classes are made of.
        split: parts of a problem that different implementations may compute; () for one as a whole.
        join: one function of those that compute the parts.
        cost: counts the bytes and operations of a call.
    """

    fuses: tuple[str, ...] = ()
    optional: bool = False
    inputs: Any = None
    inputs_name: str = "inputs"
    problem: Callable[..., Any] | None = None
    operands: tuple[str, ...] = ()
    per_call: str | None = None
    guard: Callable[[OpDeclaration, Sequence[Any]], Guard | None] | None = make_gemm_guard
    alike: Callable[[Any], Callable[[Any], bool] | None] | None = None
    counts: tuple[str, ...] = ("m",)
    split: Callable[[Any], tuple[Any, ...]] | None = None
    join: Callable[..., Callable[..., Any]] | None = None
    cost: CostFunction = read_write_cost

    @property
    def takes_inputs_only(self) -> bool:
        """Whether the inputs are its only argument."""
        return self.inputs is not None and not self.operands

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands in order."""
        return self.inputs._fields if self.takes_inputs_only else self.operands

    def flatten_operands(self, *args: Any) -> Sequence[Any]:
        """The operands of an op's arguments, one by one where its inputs are the only argument."""
        return args[0] if self.takes_inputs_only else args

    def make_problem(self, *args: Any) -> Any:
        """The problem of an op's arguments."""
        assert self.problem is not None, "an op with ranges declares its problem"
        return self.problem(*self.flatten_operands(*args))

    def to_positional_args(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a call in order; those left out at the end keep their defaults."""
        names = (self.inputs_name,) if self.takes_inputs_only else self.operands
        rest = [kwargs.get(name) for name in names[len(args) :]]
        unknown = kwargs.keys() - set(names[len(args) :])
        if unknown:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
        return (*args, *rest)

    def pack_named_inputs(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a case as the op takes them: those that are inputs put together."""
        if self.inputs is None:
            return dict(args)
        inputs = {name: value for name, value in args.items() if name in self.inputs._fields}
        others = {name: value for name, value in args.items() if name not in inputs}
        return others | {self.inputs_name: self.inputs(**inputs)}

    def unpack_inputs(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse: each argument by its own name."""
        named = dict(args)
        inputs = named.pop(self.inputs_name, None) if self.inputs is not None else None
        return named if inputs is None else named | inputs._asdict()

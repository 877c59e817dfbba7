"""The declaration that makes a file of this folder an op (see ``registry``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpDeclaration:
    """What the registry must know of an op; its file holds one, named ``DECLARATION``.

    Attributes:
        fuses: the ops that a fused op replaces, the one that names its backend first; () for any
            other op. A fused op is used only if all ops that it replaces come from its own backend
            (or from another one where its backend does not implement them), so that a backend
            chosen by the user for one op is never bypassed.
        optional: whether a fused op returns None for unsupported arguments: calling the ops that it
            replaces is then faster than running its reference.
        inputs: of an op with many arguments the NamedTuple that holds them, which its functions
            take as ``inputs``; it stands in the reference's file. A frozen dataclass says the same
            but takes five times as long to make (7.5 us for 12 fields, not 1.6), and one is made in
            every layer of every step.
    """

    fuses: tuple[str, ...] = ()
    optional: bool = False
    inputs: Any = None

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a case as the op takes them: those that are inputs put together."""
        if self.inputs is None:
            return dict(args)
        inputs = {name: value for name, value in args.items() if name in self.inputs._fields}
        others = {name: value for name, value in args.items() if name not in inputs}
        return others | {"inputs": self.inputs(**inputs)}

    def named(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse: each argument by its own name."""
        named = dict(args)
        inputs = named.pop("inputs", None) if self.inputs is not None else None
        return named if inputs is None else named | inputs._asdict()

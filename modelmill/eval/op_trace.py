"""Watches a step at work: every call of an op, with the module that makes it and what it must
move.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from modelmill.eval.op_cost import OpCost, op_cost
from modelmill.ops.registry import Ops

LabelContext = Callable[[str], AbstractContextManager[Any]]
"""Called with a label for each op and module; entered while it runs."""

SEPARATOR = "|"


@dataclass(frozen=True)
class TraceSlice:
    """One op or module at work.

    module: its name in the model. op: "" for a module. Seconds of the host's clock.
    """

    module: str
    op: str
    start: float
    end: float
    cost: OpCost = field(default_factory=OpCost)


@dataclass
class OpTrace:
    """ops: the given ones, watched. slices: in the order in which they ended."""

    ops: Ops
    slices: list[TraceSlice] = field(default_factory=list)

    @property
    def calls(self) -> list[TraceSlice]:
        """Calls of ops, in the order in which they began."""
        return sorted((each for each in self.slices if each.op), key=lambda each: each.start)


@contextlib.contextmanager
def trace_ops(
    model: nn.Module, ops: Ops, label_context: LabelContext | None = None, *, with_cost: bool = True
) -> Iterator[OpTrace]:
    """Hooks on every module and a cover on every op while the block runs.

    with_cost: whether counts are made, which reads lengths from the device.
    """
    seen = OpTrace(ops)
    stack: list[tuple[str, float, AbstractContextManager[Any]]] = []
    enter = label_context or contextlib.nullcontext

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:  # noqa: ARG001
            label = enter(make_label(name, ""))
            label.__enter__()
            stack.append((name, time.perf_counter(), label))

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        name, began, label = stack.pop()
        seen.slices.append(TraceSlice(name, "", began, time.perf_counter()))
        label.__exit__(None, None, None)

    def cover(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def covered(*args: Any, **named: Any) -> Any:
            module = stack[-1][0] if stack else ""
            with enter(make_label(module, op)):
                began = time.perf_counter()
                result = call(*args, **named)
                ended = time.perf_counter()
            made = op_cost(op, args, named, result) if with_cost else OpCost()
            seen.slices.append(TraceSlice(module, op, began, ended, made))
            return result

        return covered

    covers: dict[str, Any] = {
        op: cover(op, getattr(ops, op)) for op in ops.backends if getattr(ops, op) is not None
    }
    seen.ops = replace(ops, **covers)
    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [
                module.register_forward_pre_hook(before(name)),
                module.register_forward_hook(after),
            ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def make_label(module: str, op: str) -> str:
    """How a slice is called in a trace."""
    return f"modelmill{SEPARATOR}{module}{SEPARATOR}{op}"


def parse_label(label: str) -> tuple[str, str] | None:
    """(module, op) of such a label; None for anything else."""
    parts = label.split(SEPARATOR)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "modelmill" else None


def layer_group_name(module: str) -> str:
    """The same module of every layer under one name: layers.7.attn.core → layers.*.attn.core."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))

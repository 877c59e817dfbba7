"""Record every op call of a step with its module, time and cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelmill.ops.op_cost import OpCost
from modelmill.ops.registry import Ops, count_cost

LabelContext = Callable[[str], AbstractContextManager[Any]]
"""Called with a label for each op and module; entered while it runs."""

LABEL_SEPARATOR = "|"


@dataclass(frozen=True)
class TraceSlice:
    """One run of an op or module.

    module: its name in the model. op: "" for a module. start, end: seconds of the host's clock.
    """

    module: str
    op: str
    start: float
    end: float
    cost: OpCost = field(default_factory=OpCost)


@dataclass
class OpTrace:
    """Recorded slices of a step.

    ops: the traced ops, to run the step with. slices: in the order in which they ended.
    """

    ops: Ops
    slices: list[TraceSlice] = field(default_factory=list)

    @property
    def calls(self) -> list[TraceSlice]:
        """Op calls in the order in which they started."""
        return sorted((each for each in self.slices if each.op), key=lambda each: each.start)


@contextlib.contextmanager
def trace_ops(
    model: nn.Module, ops: Ops, label_context: LabelContext | None = None, *, with_cost: bool = True
) -> Iterator[OpTrace]:
    """Hook every module and wrap every op while the block runs.

    Args:
        model: the model to trace.
        ops: the ops to wrap; run the step with ``ops`` of the result.
        label_context: entered around each op and module with its label.
        with_cost: count bytes and operations, which reads lengths from the device.
    """
    trace = OpTrace(ops)
    stack: list[tuple[str, float, AbstractContextManager[Any]]] = []
    enter = label_context or contextlib.nullcontext

    def pre_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:  # noqa: ARG001
            label = enter(make_label(name, ""))
            label.__enter__()
            stack.append((name, time.perf_counter(), label))

        return hook

    def post_hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        name, start, label = stack.pop()
        trace.slices.append(TraceSlice(name, "", start, time.perf_counter()))
        label.__exit__(None, None, None)

    def wrap(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            module = stack[-1][0] if stack else ""
            with enter(make_label(module, op)):
                start = time.perf_counter()
                result = call(*args, **kwargs)
                end = time.perf_counter()
            cost = count_cost(op, args, kwargs, result) if with_cost else OpCost()
            trace.slices.append(TraceSlice(module, op, start, end, cost))
            return result

        return wrapped

    wrapped_ops: dict[str, Any] = {
        op: wrap(op, getattr(ops, op)) for op in ops.backends if getattr(ops, op) is not None
    }
    trace.ops = ops.replace(wrapped_ops)
    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [
                module.register_forward_pre_hook(pre_hook(name)),
                module.register_forward_hook(post_hook),
            ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def make_label(module: str, op: str) -> str:
    """Return the label of an op or module in a trace."""
    return f"modelmill{LABEL_SEPARATOR}{module}{LABEL_SEPARATOR}{op}"


def parse_label(label: str) -> tuple[str, str] | None:
    """Split such a label into (module, op); None for any other string."""
    parts = label.split(LABEL_SEPARATOR)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "modelmill" else None


def module_name_pattern(module: str) -> str:
    """Name a module of any layer by its group: layers.7.attn.core → layers.*.attn.core."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))

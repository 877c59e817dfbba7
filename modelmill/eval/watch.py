"""Watches a step at work: every call of an op, with the module that makes it and what it must move."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from modelmill.eval.counts import Count, count
from modelmill.ops.shelf import Ops

Around = Callable[[str], AbstractContextManager[Any]]
"""Called with a label for each op and module; entered while it runs."""

SEPARATOR = "|"


@dataclass(frozen=True)
class Slice:
    """One op or module at work. module: its name in the model. op: "" for a module. Seconds of the host's clock."""

    module: str
    op: str
    began: float
    ended: float
    count: Count = field(default_factory=Count)


@dataclass
class Watched:
    """ops: the given ones, watched. slices: in the order in which they ended."""

    ops: Ops
    slices: list[Slice] = field(default_factory=list)

    @property
    def calls(self) -> list[Slice]:
        """Calls of ops, in the order in which they began."""
        return sorted((each for each in self.slices if each.op), key=lambda each: each.began)


@contextlib.contextmanager
def watching(model: nn.Module, ops: Ops, around: Around | None = None, *, counted: bool = True) -> Iterator[Watched]:
    """Hooks on every module and a cover on every op while the block runs.

    counted: whether counts are made, which reads lengths from the device.
    """
    seen = Watched(ops)
    stack: list[tuple[str, float, AbstractContextManager[Any]]] = []
    enter = around or contextlib.nullcontext

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:  # noqa: ARG001
            label = enter(label_of(name, ""))
            label.__enter__()
            stack.append((name, time.perf_counter(), label))

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        name, began, label = stack.pop()
        seen.slices.append(Slice(name, "", began, time.perf_counter()))
        label.__exit__(None, None, None)

    def cover(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def covered(*args: Any, **named: Any) -> Any:
            module = stack[-1][0] if stack else ""
            with enter(label_of(module, op)):
                began = time.perf_counter()
                result = call(*args, **named)
                ended = time.perf_counter()
            made = count(op, args, named, result) if counted else Count()
            seen.slices.append(Slice(module, op, began, ended, made))
            return result

        return covered

    covers: dict[str, Any] = {op: cover(op, getattr(ops, op)) for op in ops.chosen if getattr(ops, op) is not None}
    seen.ops = replace(ops, **covers)
    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def label_of(module: str, op: str) -> str:
    """How a slice is called in a trace."""
    return f"modelmill{SEPARATOR}{module}{SEPARATOR}{op}"


def of_label(label: str) -> tuple[str, str] | None:
    """(module, op) of such a label; None for anything else."""
    parts = label.split(SEPARATOR)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "modelmill" else None


def grouped(module: str) -> str:
    """The same module of every layer under one name: layers.7.attn.mix → layers.*.attn.mix."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))

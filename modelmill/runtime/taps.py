"""Modules watched at work, by their names in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Before = Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]
After = Callable[[str, tuple[Any, ...], Any], None]


@contextlib.contextmanager
def watched(model: nn.Module, before: Before | None, after: After | None) -> Iterator[None]:
    """before: (name, args) → other arguments, or None to keep them. after: (name, args, output)."""
    handles = []
    for name, module in model.named_modules():
        if not name:
            continue
        if before is not None:
            handles.append(module.register_forward_pre_hook(_before(name, before)))
        if after is not None:
            handles.append(module.register_forward_hook(_after(name, after)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(name: str, call: Before) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:  # noqa: ARG001
        return call(name, args)

    return hook


def _after(name: str, call: After) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        call(name, args, output)

    return hook

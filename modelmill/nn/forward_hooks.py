"""Forward hooks on all modules of a model, called with the module's name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

PreHook = Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]
PostHook = Callable[[str, tuple[Any, ...], Any], None]


@contextlib.contextmanager
def attached_forward_hooks(
    model: nn.Module, before: PreHook | None, after: PostHook | None
) -> Iterator[None]:
    """Hook every module of ``model`` within the block.

    Args:
        model: The model.
        before: (name, args) → other arguments, or None to keep them.
        after: (name, args, output).
    """
    handles = []
    for name, module in model.named_modules():
        if not name:
            continue
        if before is not None:
            handles.append(module.register_forward_pre_hook(_pre_hook(name, before)))
        if after is not None:
            handles.append(module.register_forward_hook(_post_hook(name, after)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pre_hook(name: str, call: PreHook) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:  # noqa: ARG001
        return call(name, args)

    return hook


def _post_hook(name: str, call: PostHook) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        call(name, args, output)

    return hook

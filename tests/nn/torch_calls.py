"""Counts what torch computes beside the ops: on a GPU each such call is a launch of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from modelmill.ops import registry


class ComputingCalls(TorchDispatchMode):
    """Notes the torch functions that compute or copy; views and empty tensors take no launch."""

    VIEWS = (
        "view", "_unsafe_view", "transpose", "t", "mT", "slice", "split", "split_with_sizes",
        "expand", "empty", "unsqueeze", "select", "unbind", "alias", "detach",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def uncounted(ops: registry.Ops, names: Iterable[str]) -> registry.Ops:
    """These ops as if a GPU had them: their references, of which nothing is counted."""
    backends = dict(ops.backends) | dict.fromkeys(names, "triton")
    return ops.replace({name: _uncounted(name) for name in names}, backends)


def _uncounted(name: str) -> Any:
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return registry.reference(name)(*args)

    return call


def calls_of_a_step(model: torch.nn.Module, step: Any) -> list[str]:
    """The torch functions of a step, in their order."""
    # not inference_mode, in which functions made of others are not taken apart
    with torch.no_grad(), ComputingCalls() as calls:
        model(step)
    return calls.names

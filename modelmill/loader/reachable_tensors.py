"""Finds the tensors that a model holds: in modules, weights and whatever hangs on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

_PACKAGE = "modelmill."


def reachable_tensors(roots: Iterable[object]) -> list[torch.Tensor]:
    """Every tensor that objects of this package, modules and containers hold, each once.

    Args:
        roots: where to begin.
    """
    tensors: list[torch.Tensor] = []
    visited: set[int] = set()
    pending = list(roots)
    while pending:
        each = pending.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        else:
            pending += _child_objects(each)
    # the order of the model, not of the stack
    return tensors[::-1]


def _child_objects(each: object) -> Iterator[object]:
    """What an object holds, if it may hold tensors."""
    if isinstance(each, Mapping):
        yield from each.values()
    elif isinstance(each, list | tuple | set | frozenset):
        yield from each
    elif isinstance(each, nn.Module) or _is_package_object(each):
        yield from vars(each).values() if hasattr(each, "__dict__") else ()
        for cls in type(each).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(each, name):
                    yield getattr(each, name)


def _is_package_object(each: object) -> bool:
    return type(each).__module__.startswith(_PACKAGE) and not isinstance(each, type)

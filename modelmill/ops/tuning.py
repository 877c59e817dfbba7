"""Launch sizes chosen for one device, and which of them the kernels here accept.

A variant that can be tuned offers ``candidates(key)``, the sizes that it may be launched with, and takes ``chosen`` in
``run``. The choice travels as an argument of ``shelf.resolve``; nothing is kept in a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

Key = tuple[int, int, int, torch.dtype]  # rows that share a choice, N, K, dtype of x
Choices = Mapping[str, Mapping[Key, tuple[int, ...]]]  # by op

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Tuning:
    """choices: launch sizes by op and key. device: the name of the device that they were measured on."""

    device: str
    choices: Choices

    @property
    def count(self) -> int:
        """How many products have sizes of their own."""
        return sum(len(each) for each in self.choices.values())


def accepted(module: ModuleType, chosen: Mapping[Key, tuple[int, ...]]) -> dict[Key, tuple[int, ...]]:
    """What of a choice the variant offers; a file is no reason to launch anything else."""
    offered = getattr(module, "candidates", None)
    found = {}
    for key, sizes in chosen.items():
        try:
            if offered is not None and sizes in offered(key):
                found[key] = sizes
        except KeyError:  # a key that no product here has
            continue
    return found


def key_text(key: Key) -> str:
    """ "8x4096->12288 bfloat16": rows, K and N, dtype."""
    rows, n, k, dtype = key
    return f"{rows}x{k}->{n} {str(dtype).removeprefix('torch.')}"


def key_of_text(text: str) -> Key:
    """The inverse of ``key_text``. Raises ValueError for anything else."""
    shape, _, dtype = text.partition(" ")
    sides, arrow, n = shape.partition("->")
    rows, times, k = sides.partition("x")
    if not (arrow and times and dtype in DTYPES):
        raise ValueError(f"no product is called {text[:60]!r}")
    return int(rows), int(n), int(k), DTYPES[dtype]

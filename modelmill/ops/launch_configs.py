"""Launch configs chosen for one device, and which of them the kernels here accept.

An implementation that can be tuned offers ``candidates(key)``, the configs that it may be launched
with, and takes ``configs`` in ``run``. They travel as an argument of ``registry.select_backends``;
nothing is kept in a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

GemmKey = tuple[int, int, int, torch.dtype]  # rows that share a choice, N, K, dtype of x
TunedConfigs = Mapping[str, Mapping[GemmKey, tuple[int, ...]]]  # by op

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Tuning:
    """configs: launch configs by op and key.

    device: the name of the device that they were measured on.
    """

    device: str
    configs: TunedConfigs

    @property
    def count(self) -> int:
        """How many products have sizes of their own."""
        return sum(len(each) for each in self.configs.values())


def filter_supported(
    module: ModuleType, configs: Mapping[GemmKey, tuple[int, ...]]
) -> dict[GemmKey, tuple[int, ...]]:
    """What of a choice the variant offers; a file is no reason to launch anything else."""
    offered = getattr(module, "candidates", None)
    found = {}
    for key, sizes in configs.items():
        try:
            if offered is not None and sizes in offered(key):
                found[key] = sizes
        except KeyError:  # a key that no product here has
            continue
    return found


def format_key(key: GemmKey) -> str:
    """ "8x4096->12288 bfloat16": rows, K and N, dtype."""
    rows, n, k, dtype = key
    return f"{rows}x{k}->{n} {str(dtype).removeprefix('torch.')}"


def parse_key(text: str) -> GemmKey:
    """The inverse of ``format_key``. Raises ValueError for anything else."""
    shape, _, dtype = text.partition(" ")
    sides, arrow, n = shape.partition("->")
    rows, times, k = sides.partition("x")
    if not (arrow and times and dtype in DTYPES):
        raise ValueError(f"no product is called {text[:60]!r}")
    return int(rows), int(n), int(k), DTYPES[dtype]

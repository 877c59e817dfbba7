"""Autotuned launch configs of one device, filtered by what the kernels accept.

An implementation that can be tuned has ``candidates(key)``, the configs that it may be launched
with, and its ``run`` takes ``configs``. The configs are an argument of
``registry.select_backends``; no module keeps them as state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

GemmKey = tuple[int, int, int, torch.dtype]  # row bucket, N, K, dtype of x
TunedConfigsByOp = Mapping[str, Mapping[GemmKey, tuple[int, ...]]]  # by op

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class TunedLaunchConfigs:
    """Launch configs by op and key, and the name of the device that they were measured on."""

    device: str
    configs: TunedConfigsByOp

    @property
    def count(self) -> int:
        """Number of matrix products that have an autotuned config."""
        return sum(len(by_key) for by_key in self.configs.values())


def filter_by_candidates(
    module: ModuleType, configs: Mapping[GemmKey, tuple[int, ...]]
) -> dict[GemmKey, tuple[int, ...]]:
    """The configs that are among the candidates of ``module``; all others are dropped."""
    candidates = getattr(module, "candidates", None)
    supported = {}
    for key, config in configs.items():
        try:
            if candidates is not None and config in candidates(key):
                supported[key] = config
        except KeyError:  # no kernel uses this key
            continue
    return supported


def format_key(key: GemmKey) -> str:
    """Format a key as "8x4096->12288 bfloat16": rows, K and N, dtype."""
    rows, n, k, dtype = key
    return f"{rows}x{k}->{n} {str(dtype).removeprefix('torch.')}"


def parse_key(text: str) -> GemmKey:
    """Parse the output of ``format_key``.

    Raises:
        ValueError: if the text has another format.
    """
    shape, _, dtype = text.partition(" ")
    sides, arrow, n = shape.partition("->")
    rows, times, k = sides.partition("x")
    if not (arrow and times and dtype in TORCH_DTYPES):
        raise ValueError(f"not a GEMM key: {text[:60]!r}")
    return int(rows), int(n), int(k), TORCH_DTYPES[dtype]

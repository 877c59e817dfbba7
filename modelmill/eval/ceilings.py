"""What a device gives at most, measured in the run that is judged by it, and the floor of a piece of work under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelmill.ops.clock import memory_rate, product_rate


@dataclass(frozen=True)
class Ceilings:
    """memory: bytes/s (of a copy on a GPU, of reading on a CPU). products: operations/s of torch's, by dtype."""

    device: str
    memory: float
    products: dict[str, float]

    def floor(self, nbytes: float, operations: float = 0.0, dtype: str = "") -> float:
        """Seconds below which no kernel can move ``nbytes`` and do the operations."""
        rate = self.products.get(dtype)
        return max(nbytes / self.memory, operations / rate if rate else 0.0)

    def bound(self, nbytes: float, operations: float, dtype: str) -> str:
        """What sets the floor: "memory" or "products"."""
        return "memory" if self.floor(nbytes) >= self.floor(nbytes, operations, dtype) else "products"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in GB/s and TFLOP/s."""
        products = {name: round(rate / 1e12, 3) for name, rate in self.products.items()}
        return {"memory_gbps": round(self.memory / 1e9, 1), "products_tflops": products}


def measure(device: str, dtypes: Sequence[torch.dtype]) -> Ceilings:
    """Ceilings of "cpu", "cuda" or "cuda:N", in about a second."""
    products = {str(each).removeprefix("torch."): product_rate(device, each) for each in dtypes}
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return Ceilings(device, memory_rate(device), products)

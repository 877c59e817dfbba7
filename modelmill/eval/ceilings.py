"""What a device gives at most, measured in the run that is judged by it, and the floor of a piece of work under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from modelmill.ops.clock import EIGHT_BITS, memory_rate, product_rate

NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Ceilings:
    """memory: bytes/s (of a copy on a GPU, of reading on a CPU). products: operations/s of torch's, by the dtype of
    what is multiplied."""

    device: str
    memory: float
    products: dict[str, float]

    def floor(
        self, nbytes: float, operations: float = 0.0, dtype: str = "", narrow: Mapping[str, float] = NOTHING
    ) -> float:
        """Seconds below which no kernel can move ``nbytes`` and do the operations.

        dtype: of what they multiply, but for the ``narrow`` ones among them, by theirs. A dtype of theirs whose rate is
        not known counts as the others do.
        """
        known = {kind: count for kind, count in narrow.items() if self.products.get(kind)}
        seconds = sum(count / self.products[kind] for kind, count in known.items())
        rate = self.products.get(dtype)
        if rate:
            seconds += max(0.0, operations - sum(known.values())) / rate
        return max(nbytes / self.memory, seconds)

    def bound(self, nbytes: float, operations: float, dtype: str, narrow: Mapping[str, float] = NOTHING) -> str:
        """What sets the floor: "memory" or "products"."""
        return "memory" if self.floor(nbytes) >= self.floor(nbytes, operations, dtype, narrow) else "products"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in GB/s and TFLOP/s."""
        products = {name: round(rate / 1e12, 3) for name, rate in self.products.items()}
        return {"memory_gbps": round(self.memory / 1e9, 1), "products_tflops": products}


def in_words(products_tflops: Mapping[str, float]) -> str:
    """Rates of products by dtype, in words."""
    return ", ".join(f"{rate:,.4g} TFLOP/s in {name}" for name, rate in products_tflops.items())


def measure(device: str, dtypes: Sequence[torch.dtype]) -> Ceilings:
    """Ceilings of "cpu", "cuda" or "cuda:N", in about a second."""
    products = rates(device, dtypes)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return Ceilings(device, memory_rate(device), products)


def rates(device: str, dtypes: Sequence[torch.dtype]) -> dict[str, float]:
    """Operations per second of torch's products of these dtypes, and on a GPU of those of 8 bits that it has there."""
    wanted = [*dtypes, *(EIGHT_BITS if device.startswith("cuda") and dtypes else ())]
    found = {str(each).removeprefix("torch."): product_rate(device, each) for each in wanted}
    return {name: rate for name, rate in found.items() if rate is not None}

"""What a device gives at most, measured in the run that is judged by it, and the floor of a piece
of work under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from modelmill.ops.timing import EIGHT_BIT_DTYPES, matmul_throughput, memory_bandwidth

NO_OPERATIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Roofline:
    """memory_bandwidth: bytes/s (of a copy on a GPU, of reading on a CPU). matmul_rates:
    operations/s of torch's, by the dtype of what is multiplied."""

    device: str
    memory_bandwidth: float
    matmul_rates: dict[str, float]

    def min_seconds(
        self,
        nbytes: float,
        operations: float = 0.0,
        dtype: str = "",
        ops_by_8bit_dtype: Mapping[str, float] = NO_OPERATIONS,
    ) -> float:
        """Seconds below which no kernel can move ``nbytes`` and do the operations.

        dtype: of what they multiply, but for the ``ops_by_8bit_dtype`` ones among them, by theirs.
        A dtype of theirs whose rate is not known counts as the others do.
        """
        known = {
            kind: count for kind, count in ops_by_8bit_dtype.items() if self.matmul_rates.get(kind)
        }
        seconds = sum(count / self.matmul_rates[kind] for kind, count in known.items())
        rate = self.matmul_rates.get(dtype)
        if rate:
            seconds += max(0.0, operations - sum(known.values())) / rate
        return max(nbytes / self.memory_bandwidth, seconds)

    def bound(
        self,
        nbytes: float,
        operations: float,
        dtype: str,
        ops_by_8bit_dtype: Mapping[str, float] = NO_OPERATIONS,
    ) -> str:
        """What sets the floor: "memory" or "products"."""
        return (
            "memory"
            if self.min_seconds(nbytes)
            >= self.min_seconds(nbytes, operations, dtype, ops_by_8bit_dtype)
            else "products"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in GB/s and TFLOP/s."""
        products = {name: round(rate / 1e12, 3) for name, rate in self.matmul_rates.items()}
        return {"memory_gbps": round(self.memory_bandwidth / 1e9, 1), "products_tflops": products}


def describe_rates(products_tflops: Mapping[str, float]) -> str:
    """Rates of products by dtype, in words."""
    return ", ".join(f"{rate:,.4g} TFLOP/s in {name}" for name, rate in products_tflops.items())


def measure_roofline(device: str, dtypes: Sequence[torch.dtype]) -> Roofline:
    """Ceilings of "cpu", "cuda" or "cuda:N", in about a second."""
    products = measure_matmul_rates(device, dtypes)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return Roofline(device, memory_bandwidth(device), products)


def measure_matmul_rates(device: str, dtypes: Sequence[torch.dtype]) -> dict[str, float]:
    """Operations per second of torch's products of these dtypes, and on a GPU of those of 8 bits
    that it has there.
    """
    wanted = [*dtypes, *(EIGHT_BIT_DTYPES if device.startswith("cuda") and dtypes else ())]
    found = {str(each).removeprefix("torch."): matmul_throughput(device, each) for each in wanted}
    return {name: rate for name, rate in found.items() if rate is not None}

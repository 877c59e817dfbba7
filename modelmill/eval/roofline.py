"""Peak rates of a device, measured in the same run, and the roofline time of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from modelmill.ops.timing import EIGHT_BIT_DTYPES, matmul_throughput, measure_memory_bandwidth

NO_OPERATIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class RooflineCeilings:
    """Measured peak rates.

    memory_bandwidth: bytes/s of a copy on a GPU, of reading on a CPU. matmul_rates: operations/s of
    torch's matrix products, by dtype of the operands.
    """

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
        """Return the least time to move ``nbytes`` and do the operations.

        Args:
            nbytes: bytes read and written.
            operations: all operations.
            dtype: operand dtype of those that are not in ``ops_by_8bit_dtype``.
            ops_by_8bit_dtype: operations by 8-bit operand dtype; a dtype without a measured rate
                counts as ``dtype``.
        """
        ops_8bit = {
            dtype_8bit: count
            for dtype_8bit, count in ops_by_8bit_dtype.items()
            if self.matmul_rates.get(dtype_8bit)
        }
        seconds = sum(
            count / self.matmul_rates[dtype_8bit] for dtype_8bit, count in ops_8bit.items()
        )
        rate = self.matmul_rates.get(dtype)
        if rate:
            seconds += max(0.0, operations - sum(ops_8bit.values())) / rate
        return max(nbytes / self.memory_bandwidth, seconds)

    def limiting_resource(
        self,
        nbytes: float,
        operations: float,
        dtype: str,
        ops_by_8bit_dtype: Mapping[str, float] = NO_OPERATIONS,
    ) -> str:
        """Return what limits the time: "memory" or "products"."""
        return (
            "memory"
            if self.min_seconds(nbytes)
            >= self.min_seconds(nbytes, operations, dtype, ops_by_8bit_dtype)
            else "products"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict in GB/s and TFLOP/s."""
        products = {name: round(rate / 1e12, 3) for name, rate in self.matmul_rates.items()}
        return {"memory_gbps": round(self.memory_bandwidth / 1e9, 1), "products_tflops": products}


def format_matmul_rates(products_tflops: Mapping[str, float]) -> str:
    """Format the rates of matrix products by dtype."""
    return ", ".join(f"{rate:,.4g} TFLOP/s in {name}" for name, rate in products_tflops.items())


def measure_roofline(device: str, dtypes: Sequence[torch.dtype]) -> RooflineCeilings:
    """Measure the peak rates of "cpu", "cuda" or "cuda:N", in about a second."""
    products = measure_matmul_rates(device, dtypes)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return RooflineCeilings(device, measure_memory_bandwidth(device), products)


def measure_matmul_rates(device: str, dtypes: Sequence[torch.dtype]) -> dict[str, float]:
    """Measure operations per second of torch's matrix products of these dtypes.

    On a GPU the supported 8-bit dtypes are added.
    """
    all_dtypes = [*dtypes, *(EIGHT_BIT_DTYPES if device.startswith("cuda") and dtypes else ())]
    rates = {
        str(dtype).removeprefix("torch."): matmul_throughput(device, dtype) for dtype in all_dtypes
    }
    return {name: rate for name, rate in rates.items() if rate is not None}

"""Weights that torch's references expand in every step, expanded once: on a CPU where no compiled
kernel serves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.core import log, memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.nn.linear import Linear
from modelmill.ops.cpu import build as kernels
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.weights.base import (
    UNPACKED_MEMORY_FRACTION,
    UnpackedWeight,
    WeightFormat,
    unpack_spec,
)
from modelmill.weights.mixed_rows import MixedRowsWeight

_log = log.get_logger(__name__)


@dataclass(frozen=True)
class UnpackReport:
    """Weights that are expanded now, and those that stay packed because there is no room."""

    num_unpacked: int = 0
    unpacked_bytes: int = 0
    num_packed: int = 0
    packed_bytes: int = 0

    @property
    def warning(self) -> str | None:
        """One line for people about what stays packed."""
        if not self.num_packed:
            return None
        missing = format_bytes(self.packed_bytes)
        total = self.num_packed + self.num_unpacked
        return (
            f"{self.num_packed} of {total} weights are unpacked anew in every step, which is slow: "
            f"keeping them unpacked needs {missing} more memory"
        )


def unpack_cpu_weights(
    model: nn.Module, ops: Ops, dtype: torch.dtype, device: str, tp_group: TPGroup = SINGLE_RANK
) -> None:
    """Expand what would be expanded in every step, and say in the log what makes a CPU slow.

    dtype: of activations. tp_group: its ranks share this machine's memory, and the first one speaks
    for all.
    """
    if device != "cpu":
        return
    done = unpack_weights(
        model,
        ops,
        dtype,
        int(memory_limits.available_memory().free * UNPACKED_MEMORY_FRACTION) // tp_group.size,
    )
    if tp_group.rank:
        return
    for line in (missing_kernels_reason(ops), done.warning):
        if line is not None:
            _log.warning("%s", line)


def missing_kernels_reason(ops: Ops) -> str | None:
    """One line where compiled kernels could serve this CPU and cannot be had, with the way out;
    None: all is well.
    """
    reason = kernels.available("cpu")
    if reason is None or ops.backends["linear"] == "cpu":
        return None
    return f"no compiled CPU kernels, so that torch computes, several times slower: {reason}"


def unpack_weights(model: nn.Module, ops: Ops, dtype: torch.dtype, max_bytes: int) -> UnpackReport:
    """Expand the weights whose op torch's reference serves, in the order of the model, while
    ``max_bytes`` bytes last.

    A tied weight is expanded once. Products are the same to the bit.
    """
    work = _Unpacker(ops, dtype, max_bytes)
    for linear in [m for m in model.modules() if isinstance(m, Linear)]:
        linear.weight = work.unpack(linear.weight)
    return work.report


class _Unpacker:
    """One pass over a model's weights."""

    def __init__(self, ops: Ops, dtype: torch.dtype, max_bytes: int) -> None:
        self.ops, self.dtype, self.max_bytes = ops, dtype, max_bytes
        self.report = UnpackReport()
        self._unpacked_by_address: dict[int, WeightFormat] = {}

    def unpack(self, weight: WeightFormat) -> WeightFormat:
        """The weight, expanded where its op needs that and there is room."""
        if isinstance(weight, MixedRowsWeight):
            return MixedRowsWeight(tuple(map(self.unpack, weight.parts)))
        how = unpack_spec(weight)
        if how is None or self.ops.backends.get(how.op) != "torch":
            return weight
        key = weight.tensors()["weight"].data_ptr()
        if key not in self._unpacked_by_address:
            self._unpacked_by_address[key] = self._unpack_if_fits(weight, how.dtype or self.dtype)
        return self._unpacked_by_address[key]

    def _unpack_if_fits(self, weight: WeightFormat, dtype: torch.dtype) -> WeightFormat:
        size = weight.shape[0] * weight.shape[1] * dtype.itemsize
        if self.report.unpacked_bytes + size > self.max_bytes:
            more = self.report.packed_bytes + size
            self.report = replace(
                self.report, num_packed=self.report.num_packed + 1, packed_bytes=more
            )
            return weight
        made = UnpackedWeight(weight, weight.unpack(self.dtype))  # type: ignore[attr-defined]
        taken = self.report.unpacked_bytes + made.unpacked.weight.nbytes
        self.report = replace(
            self.report, num_unpacked=self.report.num_unpacked + 1, unpacked_bytes=taken
        )
        return made

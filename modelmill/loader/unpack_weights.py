"""Unpacks quantized weights once, on a CPU without compiled kernels.

The torch reference ops would unpack them in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.core import log, memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.nn.latent_attention import LatentAttentionCore
from modelmill.nn.linear import Linear
from modelmill.ops.cpu.common import build as kernels
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.weights.base import UNPACKED_MEMORY_FRACTION, PackedAndUnpackedWeight, WeightFormat
from modelmill.weights.mixed_rows import MixedRowsWeight

_log = log.get_logger(__name__)


@dataclass(frozen=True)
class UnpackReport:
    """Weights that were unpacked, and those that stay packed for lack of memory."""

    num_unpacked: int = 0
    unpacked_bytes: int = 0
    num_packed: int = 0
    packed_bytes: int = 0

    @property
    def still_packed_warning(self) -> str | None:
        """One line about the weights that stay packed; None if there are none."""
        if not self.num_packed:
            return None
        missing = format_bytes(self.packed_bytes)
        total = self.num_packed + self.num_unpacked
        return (
            f"{self.num_packed} of {total} weights are unpacked again in every step, which is "
            f"slow: keeping them unpacked needs {missing} more memory"
        )


def unpack_weights_without_kernels(
    model: nn.Module, ops: Ops, dtype: torch.dtype, tp_group: TPGroup = SINGLE_RANK
) -> None:
    """Unpack on a CPU what would be unpacked in every step, and log what makes inference slow.

    Args:
        model: The loaded model; its weights are replaced.
        ops: The selected ops.
        dtype: Of activations.
        tp_group: Its ranks share this machine's memory; only rank 0 logs.
    """
    report = unpack_weights(
        model,
        ops,
        dtype,
        int(memory_limits.read_memory_info().free * UNPACKED_MEMORY_FRACTION) // tp_group.size,
    )
    for module in model.modules():
        if isinstance(module, LatentAttentionCore):
            module.packed_up_projections()  # now, since the KV cache takes a share of what is left
    if tp_group.rank:
        return
    for line in (missing_cpu_kernels_warning(ops), report.still_packed_warning):
        if line is not None:
            _log.warning("%s", line)


def missing_cpu_kernels_warning(ops: Ops) -> str | None:
    """Why this CPU has no compiled kernels and what to do, in one line; None if it has them."""
    reason = kernels.unavailable_reason("cpu")
    if reason is None or ops.backends["linear"] == "cpu":
        return None
    return f"no compiled CPU kernels, so that torch computes, several times slower: {reason}"


def unpack_weights(model: nn.Module, ops: Ops, dtype: torch.dtype, max_bytes: int) -> UnpackReport:
    """Unpack the weights whose op runs as torch reference, in model order, up to ``max_bytes``.

    A tied weight is unpacked once. The results of the ops are bit-identical.
    """
    unpacker = _WeightUnpacker(ops, dtype, max_bytes)
    for linear in [m for m in model.modules() if isinstance(m, Linear)]:
        linear.weight = unpacker.unpack(linear.weight)
    return unpacker.report


class _WeightUnpacker:
    """One pass over a model's weights."""

    def __init__(self, ops: Ops, dtype: torch.dtype, max_bytes: int) -> None:
        self.ops = ops
        self.dtype = dtype
        self.max_bytes = max_bytes
        self.report = UnpackReport()
        self._unpacked_by_address: dict[int, WeightFormat] = {}

    def unpack(self, weight: WeightFormat) -> WeightFormat:
        """The weight, unpacked if its op needs that and memory allows."""
        if isinstance(weight, MixedRowsWeight):
            return MixedRowsWeight(tuple(map(self.unpack, weight.parts)))
        spec = weight.upcast_spec
        if spec is None or self.ops.backends.get(spec.op) != "torch":
            return weight
        key = weight.tensors()["weight"].data_ptr()
        if key not in self._unpacked_by_address:
            self._unpacked_by_address[key] = self._unpack_if_fits(weight, spec.dtype or self.dtype)
        return self._unpacked_by_address[key]

    def _unpack_if_fits(self, weight: WeightFormat, dtype: torch.dtype) -> WeightFormat:
        size = weight.shape[0] * weight.shape[1] * dtype.itemsize
        if self.report.unpacked_bytes + size > self.max_bytes:
            packed_bytes = self.report.packed_bytes + size
            self.report = replace(
                self.report, num_packed=self.report.num_packed + 1, packed_bytes=packed_bytes
            )
            return weight
        unpacked = PackedAndUnpackedWeight(weight, weight.unpack(self.dtype))
        added = sum(tensor.nbytes for tensor in unpacked.extra_unpacked_tensors())
        self.report = replace(
            self.report,
            num_unpacked=self.report.num_unpacked + 1,
            unpacked_bytes=self.report.unpacked_bytes + added,
        )
        return unpacked

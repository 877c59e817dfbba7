"""Row blocks in several weight formats, such as q, k and v that a checkpoint stores differently.

Stored are the parts' own tensors; each suffix is prefixed with the part's number and format:
``0-int4-scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.registry import Ops
from modelmill.weights.base import WeightFormat, from_tensors


@dataclass(frozen=True)
class MixedRowsWeight(WeightFormat):
    """Row blocks concatenated into one matrix.

    Attributes:
        parts: [N_i, K] each, from the first rows on.
    """

    parts: tuple[WeightFormat, ...]
    format: str = "mixed_rows"

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> MixedRowsWeight:
        """Build the weight from its stored tensors by suffix."""
        tensors_by_part: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        for suffix, tensor in tensors.items():
            number, _, rest = suffix.partition("-")
            weight_format, _, name = rest.partition("-")
            if not number.isdigit() or not name:
                raise CorruptArtifact(
                    f"a mixed_rows weight has an unknown part {suffix!r}; rebuild the engine"
                )
            tensors_by_part.setdefault(int(number), (weight_format, {}))[1][name] = tensor
        parts = tuple(
            from_tensors(weight_format, each)
            for _, (weight_format, each) in sorted(tensors_by_part.items())
        )
        if not parts or len({part.shape[1] for part in parts}) != 1:
            raise CorruptArtifact(
                "the parts of a mixed_rows weight do not fit together; rebuild the engine"
            )
        return MixedRowsWeight(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def column_slice_alignment(self) -> int:
        """Return the multiple at which columns may be cut."""
        return lcm(*(part.column_slice_alignment for part in self.parts))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return {
            f"{number}-{part.format}-{suffix}": tensor
            for number, part in enumerate(self.parts)
            for suffix, tensor in part.tensors().items()
        }

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        biases = self._split_bias(bias)
        outputs = [part.matmul(x, own, ops) for part, own in zip(self.parts, biases, strict=True)]
        return torch.cat(outputs, -1)

    def _split_bias(self, bias: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Return each part's rows of the bias, the same tensors in every call."""
        if bias is None:
            return [None] * len(self.parts)
        split = self._split_bias_cache.get(id(bias))
        if split is None or split[0] is not bias:
            rows = [part.shape[0] for part in self.parts]
            self._split_bias_cache.clear()
            split = self._split_bias_cache[id(bias)] = (bias, bias.split(rows))
        return split[1]

    @cached_property
    def _split_bias_cache(self) -> dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]]:
        """The last bias and its parts, by its identity: bound ops compare operands by it."""
        return {}

    def row_block_weights(self) -> tuple[WeightFormat, ...]:
        """Return the row blocks, from the first rows on."""
        return self.parts

    def extra_unpacked_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that expanded parts hold in addition to the stored ones."""
        return [tensor for part in self.parts for tensor in part.extra_unpacked_tensors()]

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return torch.cat([part.dequantize() for part in self.parts])

    def to(self, device: str) -> MixedRowsWeight:
        """Return a copy on the device."""
        return MixedRowsWeight(tuple(part.to(device) for part in self.parts))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> MixedRowsWeight:
        """Return the given row ranges and one column range, for one rank."""
        edges, first = [], 0
        for part in self.parts:
            edges.append((first, first + part.shape[0]))
            first += part.shape[0]
        parts = []
        for a, b in rows:  # in the order of ``rows``
            for part, (low, high) in zip(self.parts, edges, strict=True):
                begin, end = max(a, low), min(b, high)
                if begin < end:
                    parts.append(part.slice([(begin - low, end - low)], columns))
        return MixedRowsWeight(tuple(parts))

"""Rows held in several ways, one above the other: q, k and v of a checkpoint that keeps them in different forms.

Stored are the parts' own tensors, each suffix with the part's number and kind in front: ``0-int4-scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.shelf import Ops
from modelmill.weights.held import HeldWeight, from_tensors


@dataclass(frozen=True)
class Held:
    """parts: [N_i, K] each, from the first rows on."""

    parts: tuple[HeldWeight, ...]
    kind: str = "stacked"

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        found: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        for suffix, tensor in tensors.items():
            number, _, rest = suffix.partition("-")
            kind, _, name = rest.partition("-")
            if not number.isdigit() or not name:
                raise CorruptArtifact(f"a stacked weight has a part {suffix!r}; rebuild the engine")
            found.setdefault(int(number), (kind, {}))[1][name] = tensor
        parts = tuple(from_tensors(kind, each) for _, (kind, each) in sorted(found.items()))
        if not parts or len({part.shape[1] for part in parts}) != 1:
            raise CorruptArtifact("the parts of a stacked weight do not fit together; rebuild the engine")
        return Held(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def grain(self) -> int:
        return lcm(*(part.grain for part in self.parts))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}-{part.kind}-{suffix}": tensor
            for number, part in enumerate(self.parts)
            for suffix, tensor in part.tensors().items()
        }

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        found, first = [], 0
        for part in self.parts:
            last = first + part.shape[0]
            found.append(part.matmul(x, None if bias is None else bias[first:last], ops))
            first = last
        return torch.cat(found, -1)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def dense(self) -> torch.Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def to(self, device: str) -> Held:
        return Held(tuple(part.to(device) for part in self.parts))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        edges, first = [], 0
        for part in self.parts:
            edges.append((first, first + part.shape[0]))
            first += part.shape[0]
        found = []
        for a, b in rows:  # in the order asked for
            for part, (low, high) in zip(self.parts, edges, strict=True):
                begin, end = max(a, low), min(b, high)
                if begin < end:
                    found.append(part.slice([(begin - low, end - low)], columns))
        return Held(tuple(found))

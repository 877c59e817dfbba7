"""Weight-only 8 bits in groups of columns, as GGUF's Q8_0, GPTQ and compressed-tensors store them.

Nothing is rounded into this kind: it holds integers that a checkpoint brings. Stored are the codes, a scale and (unless
symmetric) an offset for every row and group, K and the group, and where columns were reordered their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.int8_group_linear import RUN, filled, unpacked
from modelmill.ops.shelf import Ops
from modelmill.weights.held import cut
from modelmill.weights.int4 import in_order

Info = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Held:
    """weight: [N, ⌈K/32⌉·32] int8; scale, offset: [N, ⌈K/group⌉] float16 or float32; offset None: zero.

    columns: K. order: [K] int32, the inputs' columns in the order in which the weight has them; None: as they come.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    columns: int
    group: int
    order: torch.Tensor | None = None
    kind: str = "int8_group"

    @staticmethod
    def from_codes(
        codes: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        group: int,
        order: torch.Tensor | None = None,
    ) -> Held:
        """codes: [N, K] int8."""
        return Held(filled(codes), scale, offset, codes.shape[1], group, order)

    @staticmethod
    def stored_info(shape: tuple[int, int], group: int, grid: torch.dtype, *, offset: bool, order: bool) -> Info:
        """Shapes and dtypes of ``tensors()``; grid: of scales and offsets."""
        rows, columns = shape
        grids = (rows, -(-columns // group))
        info: Info = {"weight": ((rows, -(-columns // RUN) * RUN), torch.int8), "scale": (grids, grid)}
        if offset:
            info["offset"] = (grids, grid)
        if order:
            info["order"] = ((columns,), torch.int32)
        return info | {"sizes": ((2,), torch.int32)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        columns, group = (int(n) for n in tensors["sizes"].tolist())
        held = Held(tensors["weight"], tensors["scale"], tensors.get("offset"), columns, group, tensors.get("order"))
        rows, wide = held.weight.shape[0], -(-columns // RUN) * RUN
        grids = [t for t in (held.scale, held.offset) if t is not None]
        fits = columns > 0 and group > 0 and group % RUN == 0 and held.weight.shape[1:] == (wide,)
        fits = fits and (held.order is None or tuple(held.order.shape) == (columns,))
        if not fits or any(tuple(t.shape) != (rows, -(-columns // group)) for t in grids):
            raise CorruptArtifact(f"an int8 weight of {columns} columns in groups of {group} is damaged; rebuild it")
        return held

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.columns

    @property
    def grain(self) -> int:
        return self.group if self.order is None else self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"weight": self.weight, "scale": self.scale}
        if self.offset is not None:
            found["offset"] = self.offset
        if self.order is not None:
            found["order"] = self.order
        return found | {"sizes": torch.tensor([self.columns, self.group], dtype=torch.int32)}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.int8_group_linear(in_order(x, self.order), self.weight, self.scale, self.offset, self.group, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def codes(self) -> torch.Tensor:
        """[N, K] int8, columns as held."""
        return self.weight[:, : self.columns]

    def dense(self) -> torch.Tensor:
        wide = unpacked(self.weight, self.scale, self.offset, self.group, self.columns)
        return wide if self.order is None else wide[:, self.order.argsort()]

    def to(self, device: str) -> Held:
        moved = [None if t is None else t.to(device) for t in (self.weight, self.scale, self.offset, self.order)]
        weight, scale, offset, order = moved
        assert weight is not None, "held"
        assert scale is not None, "held"
        return Held(weight, scale, offset, self.columns, self.group, order)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        first, last = columns
        whole = columns == (0, self.columns)
        assert whole or (self.order is None and first % self.group == 0), "columns are cut between groups"
        assert whole or last % self.group == 0 or last == self.columns, "columns are cut between groups"
        grids = (first // self.group, -(-last // self.group))
        codes = cut(self.weight, rows, (first, first - (-(last - first) // RUN) * RUN))
        offset = None if self.offset is None else cut(self.offset, rows, grids)
        return Held(codes, cut(self.scale, rows, grids), offset, last - first, self.group, self.order)

"""Weight-only int4: 16 levels a group of columns (128, 64 or 32), activations untouched.

Stored are the packed codes, a float16 scale and (unless symmetric) a float16 offset for every row and group, and two
numbers that the shapes do not tell: K and the group. ops/int4_linear.py tells the layout. Where a checkpoint's groups
are of scattered columns, the columns are held group by group and their order is stored too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.int4_linear import RUN, ZERO, codes_of, pack_codes, packed_bytes, unpacked
from modelmill.ops.shelf import Ops
from modelmill.weights.held import cut

GROUP = 128
Info = dict[str, tuple[tuple[int, ...], torch.dtype]]


def columns_of(group: int, columns: int) -> int:
    """The columns that share a scale: ``group``, or for −1 (per channel) the whole row in runs of 32."""
    return -(-columns // RUN) * RUN if group == -1 else group


@dataclass(frozen=True)
class Held:
    """weight: [N, ⌈K/32⌉·16] uint8; scale, offset: [N, ⌈K/group⌉] float16 (float32 where imported); offset None: −8 s.

    columns: K. order: [K] int32, the inputs' columns in the order in which the weight has them; None: as they come.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    columns: int
    group: int
    kind: str = "int4"
    order: torch.Tensor | None = None

    @staticmethod
    def pack(
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG004  the same for every dtype
        *,
        group: int = GROUP,
        symmetric: bool = False,
    ) -> Held:
        """Round to nearest on grids that span each group's range."""
        wide = weight.float()
        group = columns_of(group, wide.shape[1])
        scale, offset = _spanning(wide, group, symmetric)
        spread = [t.repeat_interleave(group, 1)[:, : wide.shape[1]] for t in (scale, offset)]
        codes = torch.round((wide - spread[1]) / spread[0]).clamp_(0, 15)
        return Held.from_codes(codes, scale, None if symmetric else offset, group)

    @staticmethod
    def from_codes(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int) -> Held:
        """codes: [N, K] whole numbers 0…15; scale, offset: [N, G] whose values float16 holds exactly."""
        halves = None if offset is None else offset.half()
        return Held(pack_codes(codes), scale.half(), halves, codes.shape[1], group)

    @staticmethod
    def stored_info(shape: tuple[int, int], group: int, grid: torch.dtype, *, offset: bool, order: bool) -> Info:
        """Shapes and dtypes of ``tensors()`` for codes that a checkpoint brings; grid: of scales and offsets."""
        rows, columns = shape
        grids = (rows, -(-columns // group))
        info: Info = {"weight": ((rows, packed_bytes(columns)), torch.uint8), "scale": (grids, grid)}
        if offset:
            info["offset"] = (grids, grid)
        if order:
            info["order"] = ((columns,), torch.int32)
        return info | {"sizes": ((2,), torch.int32)}

    @staticmethod
    def packed_info(
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG004
        *,
        group: int = GROUP,
        symmetric: bool = False,
    ) -> Info:
        wide = max(columns_of(group, shape[1]), 1)
        return Held.stored_info(shape, wide, torch.float16, offset=not symmetric, order=False)

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        columns, group = (int(n) for n in tensors["sizes"].tolist())
        order = tensors.get("order")
        held = Held(tensors["weight"], tensors["scale"], tensors.get("offset"), columns, group, order=order)
        rows = held.weight.shape[0]
        grids = [t for t in (held.scale, held.offset) if t is not None]
        fits = columns > 0 and group > 0 and group % RUN == 0 and held.weight.shape[1:] == (packed_bytes(columns),)
        fits = fits and (order is None or tuple(order.shape) == (columns,))
        if not fits or any(tuple(t.shape) != (rows, -(-columns // group)) for t in grids):
            raise CorruptArtifact(f"an int4 weight of {columns} columns in groups of {group} is damaged; rebuild it")
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
        return ops.int4_linear(in_order(x, self.order), self.weight, self.scale, self.offset, self.group, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def codes(self) -> torch.Tensor:
        """[N, K] uint8, columns as held."""
        return codes_of(self.weight, self.columns)

    def dense(self) -> torch.Tensor:
        wide = unpacked(self.weight, self.scale, self.offset, self.group, self.columns)
        return wide if self.order is None else wide[:, self.order.argsort()]

    def to(self, device: str) -> Held:
        offset = None if self.offset is None else self.offset.to(device)
        order = None if self.order is None else self.order.to(device)
        return Held(self.weight.to(device), self.scale.to(device), offset, self.columns, self.group, order=order)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        first, last = columns
        whole = columns == (0, self.columns)
        assert whole or (self.order is None and first % self.group == 0), "columns are cut between groups"
        assert whole or last % self.group == 0 or last == self.columns, "columns are cut between groups"
        grids = (first // self.group, -(-last // self.group))
        codes = cut(self.weight, rows, (first // 2, first // 2 + packed_bytes(last - first)))
        offset = None if self.offset is None else cut(self.offset, rows, grids)
        return Held(codes, cut(self.scale, rows, grids), offset, last - first, self.group, order=self.order)


def in_order(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] with its columns as a reordered weight has them."""
    return x if order is None else x.index_select(-1, order)


def _spanning(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """scale, offset [N, G] float32 holding float16 values; a scale of 0 becomes 1."""
    parts = weight.split(group, 1)
    low = torch.stack([p.amin(1) for p in parts], 1)
    high = torch.stack([p.amax(1) for p in parts], 1)
    if symmetric:  # 8 levels below zero and 7 above: the longer side gets the eighth
        scale = torch.where(-low > high, -low, -high) / ZERO
    else:
        scale = (high - low) / 15
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -ZERO * scale if symmetric else low.half().float()

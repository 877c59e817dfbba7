"""What weights in groups of columns have in common: codes, and a scale and an offset for every row and group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.groups import RUN
from modelmill.ops.shelf import Ops
from modelmill.weights.held import Layout, cut

Info = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Grouped(ABC):
    """scale, offset: [N, ⌈K/group⌉] float16 (float32 where imported); offset None: the kind's own meaning.

    columns: K. order: [K] int32, the inputs' columns in the order in which the weight has them; None: as they come.
    A kind says how wide a stored row is, how it multiplies and what its codes are worth.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    columns: int
    group: int
    order: torch.Tensor | None = None

    STORED: ClassVar[torch.dtype]
    LAYOUT: ClassVar[Layout]

    def __init_subclass__(cls) -> None:
        """The layout of a kind, which says by itself how codes are stored."""
        super().__init_subclass__()
        grid = (torch.float16, torch.float32)
        whole = {"order": (1, (torch.int32,)), "sizes": (1, (torch.int32,))}
        cls.LAYOUT = {"weight": (2, (cls.STORED,)), "scale": (2, grid), "offset": (2, grid), **whole}

    @staticmethod
    @abstractmethod
    def row_width(columns: int) -> int:
        """Elements of a stored row of so many columns."""

    @abstractmethod
    def _wide(self) -> torch.Tensor:
        """The weights [N, K] float32, columns as held."""

    @classmethod
    def stored_info(cls, shape: tuple[int, int], group: int, grid: torch.dtype, *, offset: bool, order: bool) -> Info:
        """Shapes and dtypes of ``tensors()`` for codes that a checkpoint brings; grid: of scales and offsets."""
        rows, columns = shape
        grids = (rows, -(-columns // group))
        info: Info = {"weight": ((rows, cls.row_width(columns)), cls.STORED), "scale": (grids, grid)}
        if offset:
            info["offset"] = (grids, grid)
        if order:
            info["order"] = ((columns,), torch.int32)
        return info | {"sizes": ((2,), torch.int32)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        if tensors["sizes"].shape != (2,):
            raise CorruptArtifact("a weight in groups has lost its sizes; rebuild the engine")
        columns, group = (int(n) for n in tensors["sizes"].tolist())
        held = cls(tensors["weight"], tensors["scale"], tensors.get("offset"), columns, group, tensors.get("order"))
        rows = held.weight.shape[0]
        grids = [t for t in (held.scale, held.offset) if t is not None]
        fits = columns > 0 and group > 0 and group % RUN == 0 and held.weight.shape[1:] == (cls.row_width(columns),)
        fits = fits and (held.order is None or _permutes(held.order, columns))
        fits = fits and len({t.dtype for t in grids}) == 1
        if not fits or any(tuple(t.shape) != (rows, -(-columns // group)) for t in grids):
            bits = "int4" if cls.STORED is torch.uint8 else "int8"
            raise CorruptArtifact(f"an {bits} weight of {columns} columns in groups of {group} is damaged; rebuild it")
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

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def dense(self) -> torch.Tensor:
        wide = self._wide()
        return wide if self.order is None else wide[:, self.order.argsort()]

    def expanded(self, dtype: torch.dtype) -> Self:  # noqa: ARG002  products are taken in float32
        return replace(self, weight=self._wide())

    def to(self, device: str) -> Self:
        offset = None if self.offset is None else self.offset.to(device)
        order = None if self.order is None else self.order.to(device)
        return replace(self, weight=self.weight.to(device), scale=self.scale.to(device), offset=offset, order=order)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Self:
        first, last = columns
        whole = columns == (0, self.columns)
        assert whole or (self.order is None and first % self.group == 0), "columns are cut between groups"
        assert whole or last % self.group == 0 or last == self.columns, "columns are cut between groups"
        grids, start = (first // self.group, -(-last // self.group)), self.row_width(first)
        codes = cut(self.weight, rows, (start, start + self.row_width(last - first)))
        offset = None if self.offset is None else cut(self.offset, rows, grids)
        return replace(self, weight=codes, scale=cut(self.scale, rows, grids), offset=offset, columns=last - first)


def _permutes(order: torch.Tensor, columns: int) -> bool:
    """Whether each column stands in the order once."""
    return order.shape == (columns,) and torch.equal(
        order.sort().values, torch.arange(columns, dtype=order.dtype, device=order.device)
    )


def in_order(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] with its columns as a reordered weight has them."""
    return x if order is None else x.index_select(-1, order)

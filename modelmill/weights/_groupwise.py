"""What weights in groups of columns have in common: codes, and a scale and an offset for every row
and group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.groupwise import PACK_COLUMNS
from modelmill.ops.registry import Ops
from modelmill.weights.base import TensorLayout, slice_tensor

PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class GroupwiseWeight(ABC):
    """scale, offset: [N, ⌈K/group⌉] float16 (float32 where imported); offset None: the format's own
    meaning.

    columns: K. perm: [K] int32, the inputs' columns in the order in which the weight has them;
    None: as they come.
    A format says how wide a stored row is, how it multiplies and what its codes are worth.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    columns: int
    group_size: int
    perm: torch.Tensor | None = None

    CODE_DTYPE: ClassVar[torch.dtype]
    LAYOUT: ClassVar[TensorLayout]

    def __init_subclass__(cls) -> None:
        """The layout of a format, which says by itself how codes are stored."""
        super().__init_subclass__()
        grid = (torch.float16, torch.float32)
        shared = {"perm": (1, (torch.int32,)), "sizes": (1, (torch.int32,))}
        cls.LAYOUT = {
            "weight": (2, (cls.CODE_DTYPE,)),
            "scale": (2, grid),
            "offset": (2, grid),
            **shared,
        }

    @staticmethod
    @abstractmethod
    def row_width(columns: int) -> int:
        """Elements of a stored row of so many columns."""

    @abstractmethod
    def _dequantize(self) -> torch.Tensor:
        """The weights [N, K] float32, columns as held."""

    @classmethod
    def stored_info(
        cls,
        shape: tuple[int, int],
        group_size: int,
        scale_dtype: torch.dtype,
        *,
        has_offset: bool,
        has_perm: bool,
    ) -> PackedInfo:
        """Shapes and dtypes of ``tensors()`` for codes that a checkpoint brings; scale_dtype: of
        scales and offsets.
        """
        rows, columns = shape
        grids = (rows, -(-columns // group_size))
        info: PackedInfo = {
            "weight": ((rows, cls.row_width(columns)), cls.CODE_DTYPE),
            "scale": (grids, scale_dtype),
        }
        if has_offset:
            info["offset"] = (grids, scale_dtype)
        if has_perm:
            info["perm"] = ((columns,), torch.int32)
        return info | {"sizes": ((2,), torch.int32)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        if tensors["sizes"].shape != (2,):
            raise CorruptArtifact("a weight in groups has lost its sizes; rebuild the engine")
        columns, group = (int(n) for n in tensors["sizes"].tolist())
        out = cls(
            tensors["weight"],
            tensors["scale"],
            tensors.get("offset"),
            columns,
            group,
            tensors.get("perm"),
        )
        rows = out.weight.shape[0]
        grids = [t for t in (out.scale, out.offset) if t is not None]
        fits = (
            columns > 0
            and group > 0
            and group % PACK_COLUMNS == 0
            and out.weight.shape[1:] == (cls.row_width(columns),)
        )
        fits = fits and (out.perm is None or _is_permutation(out.perm, columns))
        fits = fits and len({t.dtype for t in grids}) == 1
        if not fits or any(tuple(t.shape) != (rows, -(-columns // group)) for t in grids):
            bits = "int4" if cls.CODE_DTYPE is torch.uint8 else "int8"
            raise CorruptArtifact(
                f"an {bits} weight of {columns} columns in groups of {group} is damaged; rebuild it"
            )
        return out

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.columns

    @property
    def alignment(self) -> int:
        return self.group_size if self.perm is None else self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"weight": self.weight, "scale": self.scale}
        if self.offset is not None:
            found["offset"] = self.offset
        if self.perm is not None:
            found["perm"] = self.perm
        return found | {"sizes": torch.tensor([self.columns, self.group_size], dtype=torch.int32)}

    def try_linear_swiglu(
        self,
        x: torch.Tensor,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        ops: Ops,  # noqa: ARG002
    ) -> torch.Tensor | None:
        return None

    def dense(self) -> torch.Tensor:
        wide = self._dequantize()
        return wide if self.perm is None else wide[:, self.perm.argsort()]

    def unpack(self, dtype: torch.dtype) -> Self:  # noqa: ARG002
        return replace(self, weight=self._dequantize())

    def to(self, device: str) -> Self:
        offset = None if self.offset is None else self.offset.to(device)
        perm = None if self.perm is None else self.perm.to(device)
        return replace(
            self,
            weight=self.weight.to(device),
            scale=self.scale.to(device),
            offset=offset,
            perm=perm,
        )

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Self:
        first, last = columns
        all_columns = columns == (0, self.columns)
        assert all_columns or (self.perm is None and first % self.group_size == 0), (
            "columns are cut between groups"
        )
        assert all_columns or last % self.group_size == 0 or last == self.columns, (
            "columns are cut between groups"
        )
        grids, start = (
            (first // self.group_size, -(-last // self.group_size)),
            self.row_width(first),
        )
        codes = slice_tensor(self.weight, rows, (start, start + self.row_width(last - first)))
        offset = None if self.offset is None else slice_tensor(self.offset, rows, grids)
        return replace(
            self,
            weight=codes,
            scale=slice_tensor(self.scale, rows, grids),
            offset=offset,
            columns=last - first,
        )


def _is_permutation(perm: torch.Tensor, columns: int) -> bool:
    """Whether each column stands in it once."""
    return perm.shape == (columns,) and torch.equal(
        perm.sort().values, torch.arange(columns, dtype=perm.dtype, device=perm.device)
    )


def apply_perm(x: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] with its columns as a reordered weight has them."""
    return x if perm is None else x.index_select(-1, perm)

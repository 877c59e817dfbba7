"""Base class of weights quantized in groups of columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.groupwise import PACK_COLUMNS, GroupwiseLinearInputs
from modelmill.weights.base import (
    PackedTensorSpecs,
    StoredTensorDimsAndDtypes,
    WeightFormat,
    slice_tensor,
)


@dataclass(frozen=True)
class GroupwiseWeight(WeightFormat):
    """Codes with a scale and an offset for every row and group.

    A subclass defines the width of a stored row, the product and the dequantization of its codes.

    Attributes:
        weight: stored codes, [N, packed_row_elements(K)].
        scale: [N, ⌈K/group⌉] float16 (float32 where imported).
        offset: shaped as scale; None means the format's default offset.
        columns: K.
        group_size: columns that share a scale.
        perm: [K] int32, input column of each stored column; None if the columns are not permuted.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    columns: int
    group_size: int
    perm: torch.Tensor | None = None

    CODE_DTYPE: ClassVar[torch.dtype]
    SCALE_DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.float32)
    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes]

    def __init_subclass__(cls) -> None:
        """Set STORED_TENSORS from the subclass's CODE_DTYPE and SCALE_DTYPES."""
        super().__init_subclass__()
        grid = cls.SCALE_DTYPES
        shared = {"perm": (1, (torch.int32,)), "sizes": (1, (torch.int32,))}
        cls.STORED_TENSORS = {
            "weight": (2, (cls.CODE_DTYPE,)),
            "scale": (2, grid),
            "offset": (2, grid),
            **shared,
        }

    @staticmethod
    @abstractmethod
    def packed_row_elements(columns: int) -> int:
        """Return the number of stored elements in a row of this many columns."""

    @abstractmethod
    def _dequantize_in_stored_order(self) -> torch.Tensor:
        """Return the weights [N, K] float32, columns in stored order."""

    @classmethod
    def stored_tensor_specs(
        cls,
        shape: tuple[int, int],
        group_size: int,
        scale_dtype: torch.dtype,
        *,
        has_offset: bool,
        has_perm: bool,
    ) -> PackedTensorSpecs:
        """Return shapes and dtypes of ``tensors()`` for codes that come from a checkpoint.

        Args:
            shape: (N, K).
            group_size: columns that share a scale.
            scale_dtype: dtype of scales and offsets.
            has_offset: whether offsets are stored.
            has_perm: whether a column permutation is stored.
        """
        rows, columns = shape
        grids = (rows, -(-columns // group_size))
        info: PackedTensorSpecs = {
            "weight": ((rows, cls.packed_row_elements(columns)), cls.CODE_DTYPE),
            "scale": (grids, scale_dtype),
        }
        if has_offset:
            info["offset"] = (grids, scale_dtype)
        if has_perm:
            info["perm"] = ((columns,), torch.int32)
        return info | {"sizes": ((2,), torch.int32)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Build the weight from its stored tensors by suffix."""
        if tensors["sizes"].shape != (2,):
            raise CorruptArtifact("a group-wise weight has no valid sizes; rebuild the engine")
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
            and out.weight.shape[1:] == (cls.packed_row_elements(columns),)
        )
        fits = fits and (out.perm is None or _is_permutation(out.perm, columns))
        fits = fits and len({t.dtype for t in grids}) == 1
        if not fits or any(tuple(t.shape) != (rows, -(-columns // group)) for t in grids):
            raise CorruptArtifact(
                f"a weight of format {cls.format} and {columns} columns in groups of {group} is "
                "damaged; rebuild the engine"
            )
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.weight.shape[0], self.columns

    @property
    def column_slice_alignment(self) -> int:
        """Return the multiple at which columns may be cut."""
        return self.group_size if self.perm is None else self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        tensors_by_suffix = {"weight": self.weight, "scale": self.scale}
        if self.offset is not None:
            tensors_by_suffix["offset"] = self.offset
        if self.perm is not None:
            tensors_by_suffix["perm"] = self.perm
        return tensors_by_suffix | {
            "sizes": torch.tensor([self.columns, self.group_size], dtype=torch.int32)
        }

    def _linear_inputs(self, x: torch.Tensor, bias: torch.Tensor | None) -> GroupwiseLinearInputs:
        """Return the operands of a product with x [T, K]."""
        x = permute_input_columns(x, self.perm)
        return GroupwiseLinearInputs(x, self.weight, self.scale, self.offset, self.group_size, bias)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        wide = self._dequantize_in_stored_order()
        return wide if self.perm is None else wide[:, self.perm.argsort()]

    def unpack(self, dtype: torch.dtype) -> Self:  # noqa: ARG002
        """Return the weight with its values expanded for activations of dtype."""
        return replace(self, weight=self._dequantize_in_stored_order())

    def to(self, device: str) -> Self:
        """Return a copy on the device."""
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
        """Return the given row ranges and one column range, for one rank."""
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
            self.packed_row_elements(first),
        )
        codes = slice_tensor(
            self.weight, rows, (start, start + self.packed_row_elements(last - first))
        )
        offset = None if self.offset is None else slice_tensor(self.offset, rows, grids)
        return replace(
            self,
            weight=codes,
            scale=slice_tensor(self.scale, rows, grids),
            offset=offset,
            columns=last - first,
        )


def _is_permutation(perm: torch.Tensor, columns: int) -> bool:
    """Return whether each column occurs exactly once."""
    return perm.shape == (columns,) and torch.equal(
        perm.sort().values, torch.arange(columns, dtype=perm.dtype, device=perm.device)
    )


def permute_input_columns(x: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """Return x [T, K] with its columns in the stored order of a permuted weight."""
    return x if perm is None else x.index_select(-1, perm)

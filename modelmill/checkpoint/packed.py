"""A matrix as a checkpoint stores it in few bits: whole numbers, scales, and where scales lie, without expanding it.

weight[n, k] = scale[n, g] · code[n, k] + offset[n, g], where g is the group of column k. Containers that hold such
matrices offer ``form(name)`` (known before a value is read) and ``packed(name)``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.core.errors import CorruptCheckpoint

RUN = 32
"""Columns share their scale in multiples of this where a matrix can be kept as it is."""


@dataclass(frozen=True)
class Form:
    """How a matrix [rows, columns] is stored.

    label: for people. bits: 4 (codes 0…15) or 8 (−128…127). group: columns that share a scale. offset: whether there
    are offsets; without them 4-bit codes lie around 8, 8-bit ones around 0. grid: the type that holds scales and
    offsets exactly. order: a digest of the columns' order where they are not held in the order of the inputs.
    transposed: the name means the transpose, [columns, rows].
    """

    label: str
    bits: int
    rows: int
    columns: int
    group: int
    offset: bool
    grid: torch.dtype
    order: str | None = None
    transposed: bool = False

    @property
    def kind(self) -> str:
        """The kind of weight that holds it (weights/<kind>.py)."""
        if self.bits == 4:
            return "int4"
        plain = self.group >= self.columns and not self.offset and self.order is None
        return "int8" if plain else "int8_group"

    @property
    def alike(self) -> tuple[object, ...]:
        """What two matrices must have in common to be held as one, rows above rows."""
        return self.kind, self.columns, self.group, self.offset, self.grid, self.order


@dataclass(frozen=True)
class Packed:
    """The values: codes [N, K] uint8 (4 bits) or int8; scale, offset [N, G]; order [K] int32.

    Columns stand in ``order``; None: as the inputs come.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    order: torch.Tensor | None = None

    def dense(self, group: int) -> torch.Tensor:
        """[N, K] float32, columns as the inputs come."""
        four = self.codes.dtype is torch.uint8
        columns = self.codes.shape[1]
        scale = self.scale.float().repeat_interleave(group, 1)[:, :columns]
        if self.offset is None:
            wide = (self.codes.float() - (8 if four else 0)) * scale
        else:
            wide = self.codes.float() * scale + self.offset.float().repeat_interleave(group, 1)[:, :columns]
        return wide if self.order is None else wide[:, self.order.argsort()]


def words(info: TensorInfo, where: Path) -> tuple[int, int]:
    """[R, C] of a matrix of packed words. Raises CorruptCheckpoint where it is none of int32."""
    return _matrix(info, where, info.dtype == "int32", "int32")


def scales(info: TensorInfo, where: Path) -> tuple[int, int]:
    """[R, C] of a matrix of scales. Raises CorruptCheckpoint where it is none of floating-point numbers."""
    return _matrix(info, where, info.torch_dtype.is_floating_point, "floating-point")


def _matrix(info: TensorInfo, where: Path, fits: bool, kind: str) -> tuple[int, int]:
    if not fits or len(info.shape) != 2 or 0 in info.shape:
        raise CorruptCheckpoint(
            f"{where}: {info.name} is {info.dtype} {list(info.shape)} where a matrix of {kind} numbers is needed; "
            "download the checkpoint again"
        )
    return info.shape[0], info.shape[1]


def numbers_of(raw: Container, name: str, columns: int, where: Path) -> torch.Tensor:
    """The group number [K] of each column. Raises CorruptCheckpoint where these are not ``columns`` whole numbers."""
    info = raw.info(name)
    if info.shape != (columns,):
        count = info.shape[0] if len(info.shape) == 1 else list(info.shape)
        raise CorruptCheckpoint(f"{where}: {name} has {count} entries for {columns} columns")
    if info.dtype not in ("int32", "int64"):
        raise CorruptCheckpoint(f"{where}: {name} is {info.dtype} where whole numbers are needed")
    return raw.get(name)


def nibbles(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] → uint8 [R, C · 32/bits]: the fields of each word, the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (stored[:, :, None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1).to(torch.uint8)


def order_of(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """The order [K] int32 that puts columns of equal group number side by side; None where they are so already.

    Raises ValueError where some group has another number of columns than ``group`` (the last may be shorter).
    """
    columns = len(groups)
    expected = torch.arange(columns) // group
    if torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], expected):
        raise ValueError("groups of uneven size")
    return order.to(torch.int32)


def digest_of(order: torch.Tensor | None) -> str | None:
    """A name for an order, to tell equal ones."""
    return None if order is None else hashlib.sha256(order.numpy().tobytes()).hexdigest()[:16]

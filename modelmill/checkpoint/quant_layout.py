"""The quantization layout of a matrix: integers, scales and their groups, without expansion.

weight[n, k] = scale[n, g] · code[n, k] + offset[n, g], where g is the group of column k; MXFP4's
codes and scales are floats (``weights.mxfp4``). Containers with such matrices have
``quant_layout(name)`` (known before a value is read) and ``read_quantized_matrix(name)``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote
from modelmill.weights.mxfp4 import Mxfp4Weight

GROUP_SIZE_MULTIPLE = 32
"""Group sizes must be multiples of this for a matrix to be kept."""


@dataclass(frozen=True)
class QuantLayout:
    """How a matrix [rows, columns] is stored.

    Attributes:
        label: for messages.
        bits: 4 (codes 0…15) or 8 (−128…127).
        group_size: columns that share a scale.
        has_offset: whether there are offsets; without them 4-bit codes are centred at 8, 8-bit ones
            at 0.
        scale_dtype: the dtype that represents scales and offsets exactly; uint8: MXFP4's exponents.
        perm_digest: a digest of the column permutation; empty without one.
        transposed: the name refers to the transpose, [columns, rows].
    """

    label: str
    bits: int
    rows: int
    columns: int
    group_size: int
    has_offset: bool
    scale_dtype: torch.dtype
    perm_digest: str | None = None
    transposed: bool = False

    @property
    def weight_format(self) -> str:
        """Return the weight format that stores it (weights/<format>.py)."""
        if self.scale_dtype is torch.uint8:
            return "mxfp4"
        if self.bits == 4:
            return "int4"
        plain = self.group_size >= self.columns and not self.has_offset and self.perm_digest is None
        return "int8" if plain else "int8_group"

    @property
    def merge_key(self) -> tuple[object, ...]:
        """Return what two matrices must have in common to be concatenated by rows."""
        return (
            self.weight_format,
            self.columns,
            self.group_size,
            self.has_offset,
            self.scale_dtype,
            self.perm_digest,
        )


class PackedMatrixShape(NamedTuple):
    """What the packed tensors of a matrix [N, K] say: N, K, and groups per row."""

    rows: int
    columns: int
    groups: int


def checked_packed_matrix_shape(
    raw: Container, stem: str, path: Path, bits: int, *, packed_along_rows: bool
) -> PackedMatrixShape:
    """Return the shape of a matrix of qweight, qzeros [G, N·bits/32] and scales [G, N].

    Args:
        raw: the checkpoint's tensors.
        stem: of the names.
        path: of the checkpoint, for messages.
        bits: of a code, 4 or 8.
        packed_along_rows: qweight is [K, N·bits/32], not [K·bits/32, N].

    Raises:
        CorruptCheckpoint: if the three do not fit.
    """
    codes, zeros = (
        checked_packed_words_shape(raw.tensor_info(f"{stem}.{part}"), path)
        for part in ("qweight", "qzeros")
    )
    scales = checked_scales_shape(raw.tensor_info(f"{stem}.scales"), path)
    codes_per_word = 32 // bits
    rows, columns = codes[1], codes[0] * codes_per_word
    if packed_along_rows:
        rows, columns = codes[1] * codes_per_word, codes[0]
    for part, words, fits in (
        ("qweight", codes, scales[1] == rows),
        ("qzeros", zeros, scales == (zeros[0], zeros[1] * codes_per_word)),
    ):
        if not fits:
            raise CorruptCheckpoint(
                f"{path}: {stem}.{part} {list(words)} and scales {list(scales)} do not fit"
            )
    return PackedMatrixShape(rows, columns, scales[0])


@dataclass(frozen=True)
class QuantizedMatrix:
    """The values: codes [N, K] uint8 (4 bits) or int8; scale, offset [N, G]; perm [K] int32.

    Columns are in the order of ``perm``; None: in the order of the inputs.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    perm: torch.Tensor | None = None

    def dequantize(self, group_size: int) -> torch.Tensor:
        """Return [N, K] float32, columns in the order of the inputs."""
        if self.scale.dtype is torch.uint8:
            return Mxfp4Weight.from_codes(self.codes, self.scale).dequantize()
        four = self.codes.dtype is torch.uint8
        columns = self.codes.shape[1]
        scale = self.scale.float().repeat_interleave(group_size, 1)[:, :columns]
        if self.offset is None:
            wide = (self.codes.float() - (8 if four else 0)) * scale
        else:
            wide = (
                self.codes.float() * scale
                + self.offset.float().repeat_interleave(group_size, 1)[:, :columns]
            )
        return wide if self.perm is None else wide[:, self.perm.argsort()]


def parse_group_size(group_size: object, subject: str) -> int:
    """Return a config's group size.

    Raises:
        CheckpointError: if such groups cannot be kept; ``subject`` begins the message.
    """
    if isinstance(group_size, int):
        fits = group_size >= GROUP_SIZE_MULTIPLE and group_size % GROUP_SIZE_MULTIPLE == 0
        if group_size == -1 or fits:
            return group_size
    raise CheckpointError(
        f"{subject} in groups of {quote(group_size, 60)}; "
        f"groups of −1 or a multiple of {GROUP_SIZE_MULTIPLE} "
        "can be kept; take the original and build with -q int4 --group-size 32"
    )


def group_size_text(group_size: int) -> str:
    """Return a config's group size for messages."""
    return " a channel" if group_size == -1 else f" in groups of {group_size}"


def checked_packed_words_shape(info: TensorInfo, path: Path) -> tuple[int, int]:
    """Return [R, C] of packed words; raises CorruptCheckpoint if it is not an int32 matrix."""
    return _checked_matrix_shape(info, path, info.dtype == "int32", "int32")


def checked_scales_shape(info: TensorInfo, path: Path) -> tuple[int, int]:
    """Return [R, C] of a matrix of scales.

    Raises:
        CorruptCheckpoint: if it is not a floating-point matrix.
    """
    return _checked_matrix_shape(info, path, info.decoded_dtype.is_floating_point, "floating-point")


def _checked_matrix_shape(
    info: TensorInfo, path: Path, fits: bool, number_type: str
) -> tuple[int, int]:
    if not fits or len(info.shape) != 2 or 0 in info.shape:
        raise CorruptCheckpoint(
            f"{path}: {info.name} is {info.dtype} {list(info.shape)} where a matrix of "
            f"{number_type} numbers is "
            "needed; download the checkpoint again"
        )
    return info.shape[0], info.shape[1]


def read_group_index(raw: Container, name: str, num_columns: int, path: Path) -> torch.Tensor:
    """Return the group number [K] of each column.

    Raises:
        CorruptCheckpoint: if these are not ``num_columns`` integers.
    """
    info = raw.tensor_info(name)
    if info.shape != (num_columns,):
        count = info.shape[0] if len(info.shape) == 1 else list(info.shape)
        raise CorruptCheckpoint(f"{path}: {name} has {count} entries for {num_columns} columns")
    if info.dtype not in ("int32", "int64"):
        raise CorruptCheckpoint(f"{path}: {name} is {info.dtype} where integers are required")
    return raw.get(name)


def unpack_fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [R, C] to uint8 [R, C · 32/bits], the lowest field of each word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1).to(torch.uint8)


def perm_from_group_index(group_index: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """Return the order [K] int32 that sorts columns by group; None if they are sorted.

    Raises:
        ValueError: if a group does not have ``group_size`` columns (the last may be shorter).
    """
    columns = len(group_index)
    expected = torch.arange(columns) // group_size
    if torch.equal(group_index.long(), expected):
        return None
    order = torch.argsort(group_index.long(), stable=True)
    if not torch.equal(group_index.long()[order], expected):
        raise ValueError("groups of uneven size")
    return order.to(torch.int32)


def perm_digest(perm: torch.Tensor | None) -> str | None:
    """Return a digest that identifies a permutation."""
    return None if perm is None else hashlib.sha256(perm.numpy().tobytes()).hexdigest()[:16]

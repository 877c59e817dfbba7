"""Reads GGUF files (version 2 and 3, little-endian); every field is checked before its use.

Every count, length and offset is compared with the file's size before anything is read or
allocated, so that a wrong header causes an error and no allocation. Values are read tensor by
tensor with plain reads instead of a mapping, so that a file that shrinks meanwhile is an error and
not a crash.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from modelmill.checkpoint.container import TensorInfo, no_such_tensor_error
from modelmill.checkpoint.ggml_types import (
    CHUNK_VALUES,
    GGML_TYPES,
    GgmlType,
    dequantize_ggml_blocks,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote

MAX_DIMENSIONS = 4
MAX_ARRAY_NESTING = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

SCALAR_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
BOOL_VALUE_TYPE, STRING_VALUE_TYPE, ARRAY_VALUE_TYPE = 7, 8, 9

MIN_METADATA_ENTRY_BYTES = 8 + 4 + 1
"""Fewest bytes of a metadata entry: the key's length, the value's type, a one-byte value."""
MIN_TENSOR_ENTRY_BYTES = 8 + 4 + 4 + 8
"""Fewest bytes of a tensor's entry: the name's length, dimension count, type, offset."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor and the offset of its bytes in the file; shape is in torch order (rows first)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    offset: int
    nbytes: int


EXPERT_SEPARATOR = "#"


class GgufFile:
    """One GGUF file under its own tensor names (blk.0.attn_q.weight).

    A matrix of a stack [E, N, K] is a tensor, too: blk.0.ffn_up_exps.weight#3.

    metadata: numbers, strings and bools as Python values, arrays of numbers as numpy arrays, arrays
    of strings as lists (bytes that are not UTF-8 become surrogate escapes). Raises
    CorruptCheckpoint for anything that contradicts the file's size or itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            header = _GgufHeader(path, stream)
            self.metadata: dict[str, Any] = header.metadata
            self._tensors = header.read_tensor_entries()

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        placed = self._find_tensor(name)
        return TensorInfo(name, placed.shape, placed.ggml_type.label, placed.nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor in GGUF's own row order; block formats as float32."""
        placed = self._find_tensor(name)
        if not placed.ggml_type.is_supported:
            raise CheckpointError(
                f"{self.path}: {quote(name)} is stored as {placed.ggml_type.name}, which "
                "modelmill cannot expand; "
                "use a Q4_0 to Q8_0, K-quant or 16-bit GGUF"
            )
        with self.path.open("rb") as stream:
            stream.seek(placed.offset)
            if placed.ggml_type.dtype is not None:
                plain = torch.empty(placed.shape, dtype=placed.ggml_type.dtype)
                self._fill_from_stream(stream, plain.view(-1).view(torch.uint8))
                return plain
            return self._read_dequantized(stream, placed)

    def read_raw_blocks(self, name: str) -> torch.Tensor:
        """Return the blocks of a matrix as stored: uint8 [rows, blocks, bytes of a block]."""
        placed = self._find_tensor(name)
        assert placed.ggml_type.dtype is None, f"{name} is not stored in blocks"
        stored = torch.empty(
            placed.shape[0],
            placed.shape[1] // placed.ggml_type.block_values,
            placed.ggml_type.block_bytes,
            dtype=torch.uint8,
        )
        with self.path.open("rb") as stream:
            stream.seek(placed.offset)
            self._fill_from_stream(stream, stored.view(-1))
        return stored

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return [self.path]

    def has_equal_stored_bytes(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal stored bytes; stops at the first difference."""
        a, b = self._find_tensor(one), self._find_tensor(other)
        if (a.shape, a.ggml_type) != (b.shape, b.ggml_type):
            return False
        with self.path.open("rb") as stream:
            for start in range(0, a.nbytes, CHUNK_VALUES):
                size = min(CHUNK_VALUES, a.nbytes - start)
                stream.seek(a.offset + start)
                chunk = stream.read(size)
                stream.seek(b.offset + start)
                if chunk != stream.read(size):
                    return False
        return True

    def _find_tensor(self, name: str) -> GgufTensor:
        if name in self._tensors:
            return self._tensors[name]
        stacked, _, number = name.rpartition(EXPERT_SEPARATOR)
        whole = self._tensors.get(stacked)
        if whole is None or len(whole.shape) != 3 or not 0 <= int(number) < whole.shape[0]:
            raise no_such_tensor_error(self.path, name)
        size = whole.nbytes // whole.shape[0]
        return replace(
            whole, shape=whole.shape[1:], offset=whole.offset + int(number) * size, nbytes=size
        )

    def _read_dequantized(self, stream: BinaryIO, placed: GgufTensor) -> torch.Tensor:
        result = torch.empty(placed.shape, dtype=torch.float32)
        flat, ggml_type = result.view(-1), placed.ggml_type
        step = CHUNK_VALUES // ggml_type.block_values * ggml_type.block_values
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            stored = torch.empty(
                part.numel() // ggml_type.block_values * ggml_type.block_bytes, dtype=torch.uint8
            )
            self._fill_from_stream(stream, stored)
            dequantize_ggml_blocks(ggml_type, stored, part)
        return result

    def _fill_from_stream(self, stream: BinaryIO, data: torch.Tensor) -> None:
        view = data.numpy().data
        while len(view):
            count = stream.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CorruptCheckpoint(f"{self.path}: became shorter while it was read")
            view = view[count:]


class _GgufHeader:
    """Everything before the tensor data, read with a check before each step."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream
        self.size = path.stat().st_size
        self.position = 0
        if self.size < 24 or self._read_bytes(4) != b"GGUF":
            raise self._corrupt_error(
                "is not a GGUF file (no GGUF magic at its start, or too short)"
            )
        version = self._read_number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{path}: is a big-endian GGUF file; convert it to little-endian first"
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{path}: has GGUF version {version}; modelmill reads versions 2 and 3"
            )
        self.tensor_count = self._read_number("<Q")
        pair_count = self._read_number("<Q")
        self._check_count_fits_file(pair_count, MIN_METADATA_ENTRY_BYTES, "metadata entries")
        self._check_count_fits_file(self.tensor_count, MIN_TENSOR_ENTRY_BYTES, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._read_name("metadata key")
            if key in self.metadata:
                raise self._corrupt_error(f"has the metadata key {quote(key)} twice")
            self.metadata[key] = self._read_value(self._read_number("<I"), key, 0)

    def read_tensor_entries(self) -> dict[str, GgufTensor]:
        """Return the tensor entries with absolute offsets, inside the file and disjoint."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        power_of_two = (
            isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
        )
        if not power_of_two or alignment > MAX_ALIGNMENT:
            raise self._corrupt_error(
                f"asks for an alignment of {quote(alignment)} bytes, which is no power of two"
            )
        entries: dict[str, GgufTensor] = {}
        for _ in range(self.tensor_count):
            entry = self._read_tensor_entry(alignment)
            if entry.name in entries:
                raise self._corrupt_error(f"has the tensor {quote(entry.name)} twice")
            entries[entry.name] = entry
        start = (self.position + alignment - 1) // alignment * alignment
        placed = {
            e.name: GgufTensor(e.name, e.shape, e.ggml_type, start + e.offset, e.nbytes)
            for e in entries.values()
        }
        end, before = 0, ""
        for entry in sorted(placed.values(), key=lambda e: e.offset):
            if entry.offset + entry.nbytes > self.size:
                raise self._corrupt_error(
                    f"ends at byte {self.size}, but {quote(entry.name)} needs it to reach "
                    f"{entry.offset + entry.nbytes}; the file is truncated, download it again"
                )
            if entry.nbytes and entry.offset < end:
                raise self._corrupt_error(f"has {quote(entry.name)} overlapping {quote(before)}")
            if entry.nbytes:
                end, before = entry.offset + entry.nbytes, entry.name
        return placed

    def _read_tensor_entry(self, alignment: int) -> GgufTensor:
        name = self._read_name("tensor name")
        count = self._read_number("<I")
        if count > MAX_DIMENSIONS:
            raise self._corrupt_error(
                f"gives {quote(name)} {count} dimensions; there are at most {MAX_DIMENSIONS}"
            )
        dims = [self._read_number("<Q") for _ in range(count)]
        number, offset = self._read_number("<I"), self._read_number("<Q")
        ggml_type = GGML_TYPES.get(number)
        if ggml_type is None:
            raise CheckpointError(
                f"{self.path}: {quote(name)} has the unknown ggml type number {number}"
            )
        values = 1
        for dim in dims:
            values *= dim
        # The product is a Python integer, so it cannot wrap around the way 64-bit arithmetic does.
        nbytes = values // ggml_type.block_values * ggml_type.block_bytes
        if (dims[0] if dims else 1) % ggml_type.block_values:
            raise self._corrupt_error(
                f"gives {quote(name)} rows that are no whole number of {ggml_type.name} blocks"
            )
        if (
            nbytes > self.size
            or offset > self.size
            or max(dims, default=0) > self.size * ggml_type.block_values
        ):
            raise self._corrupt_error(
                f"says {quote(name)} has {nbytes} bytes at {offset}, but the file has {self.size} "
                "in all"
            )
        if offset % alignment:
            raise self._corrupt_error(
                f"places {quote(name)} at {offset}, which is not aligned to {alignment}"
            )
        return GgufTensor(name, tuple(reversed(dims)), ggml_type, offset, nbytes)

    def _read_value(self, value_type: int, key: str, depth: int) -> Any:
        if value_type == STRING_VALUE_TYPE:
            return self._read_text(key)
        if value_type == ARRAY_VALUE_TYPE:
            return self._read_array(key, depth)
        if value_type not in SCALAR_DTYPES:
            raise self._corrupt_error(
                f"gives the metadata key {quote(key)} the unknown type {value_type}"
            )
        dtype = SCALAR_DTYPES[value_type]
        data = self._read_bytes(dtype.itemsize)
        return (
            data != b"\0" if value_type == BOOL_VALUE_TYPE else np.frombuffer(data, dtype)[0].item()
        )

    def _read_array(self, key: str, depth: int) -> Any:
        ggml_type, count = self._read_number("<I"), self._read_number("<Q")
        if depth >= MAX_ARRAY_NESTING:
            raise self._corrupt_error(f"nests the arrays of {quote(key)} too deeply")
        if ggml_type in SCALAR_DTYPES:
            self._check_count_fits_file(
                count, SCALAR_DTYPES[ggml_type].itemsize, f"values of {quote(key)}"
            )
            data = self._read_bytes(count * SCALAR_DTYPES[ggml_type].itemsize)
            if ggml_type == BOOL_VALUE_TYPE:
                return np.frombuffer(data, np.uint8) != 0
            return np.frombuffer(data, SCALAR_DTYPES[ggml_type])
        self._check_count_fits_file(
            count, 8 if ggml_type == STRING_VALUE_TYPE else 12, f"values of {quote(key)}"
        )
        return [self._read_value(ggml_type, key, depth + 1) for _ in range(count)]

    def _read_name(self, description: str) -> str:
        length = self._read_number("<Q")
        if length > 65535:
            raise self._corrupt_error(f"has a {description} of {length} bytes")
        try:
            return self._read_bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._corrupt_error(f"has a {description} that is not UTF-8") from None

    def _read_text(self, key: str) -> str:
        length = self._read_number("<Q")
        self._check_count_fits_file(length, 1, f"bytes in {quote(key)}")
        return self._read_bytes(length).decode("utf-8", errors="surrogateescape")

    def _check_count_fits_file(self, count: int, min_bytes: int, description: str) -> None:
        if count * min_bytes > self.size - self.position:
            raise self._corrupt_error(
                f"claims {count} {description}, more than its remaining "
                f"{self.size - self.position} bytes can hold"
            )

    def _read_number(self, format_code: str) -> int:
        value: int = struct.unpack(format_code, self._read_bytes(struct.calcsize(format_code)))[0]
        return value

    def _read_bytes(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self._corrupt_error(
                f"is truncated: it ends at byte {self.size}, inside its header"
            )
        data = self.stream.read(count)
        if len(data) != count:
            raise self._corrupt_error("became shorter while it was read")
        self.position += count
        return data

    def _corrupt_error(self, problem: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path}: {problem}; download it again")

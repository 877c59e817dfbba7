"""Weight files: the safetensors format, written as a stream and read through mmap.

The writer gets all shapes beforehand, so that one tensor is in memory at a time; a thread computes
the sha256 while the same bytes are written. Every tensor starts on a 64-byte boundary (padding is a
tensor of its own, since the format allows no holes), so that kernels may use aligned vector loads
on the mapped file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from modelmill.core.errors import CorruptArtifact

TensorSpec = tuple[tuple[int, ...], torch.dtype]
TENSOR_ALIGNMENT_BYTES = 64
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_PAD_PREFIX = "__pad"
_INLINE_HASH_BYTES = 1 << 16  # smaller tensors are hashed before a thread would have started


class ShardWriter:
    """Writes tensors of known shapes in the given order; ``close`` returns {"sha256", "bytes"}."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self._remaining = dict(specs)
        self._hash = hashlib.sha256()
        self._hash_thread = ThreadPoolExecutor(1)
        header, self._pads = _build_safetensors_header(specs)
        self._file = path.open("wb")
        self._size = 0
        self._write_and_hash(header)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; its name, shape and dtype must equal the declared ones."""
        expected = next(iter(self._remaining))
        shape, dtype = self._remaining.pop(expected)
        assert name == expected, f"{name} written where {expected} was announced"
        assert tuple(tensor.shape) == shape, (
            f"{name}: {tuple(tensor.shape)} is not the announced {shape}"
        )
        assert tensor.dtype == dtype, f"{name}: {tensor.dtype} is not the announced {dtype}"
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            self._write_and_hash(flat.view(torch.uint8).numpy().data)
        self._write_and_hash(b"\0" * self._pads[name])

    def close(self) -> dict[str, int | str]:
        """Flush to the disk and return the file's hash and size."""
        assert not self._remaining, f"never written: {', '.join(self._remaining)}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"sha256": self._hash.hexdigest(), "bytes": self._size}

    def _write_and_hash(self, data: bytes | memoryview) -> None:
        if len(data) < _INLINE_HASH_BYTES:
            self._hash.update(data)
            self._file.write(data)
        else:
            hashed = self._hash_thread.submit(self._hash.update, data)
            try:
                self._file.write(data)
            finally:
                hashed.result()
        self._size += len(data)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hash_thread.shutdown()
        self._file.close()


def _build_safetensors_header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {}
    pads: dict[str, int] = {}
    offset = 0
    for name, (shape, dtype) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
        pads[name] = pad = -offset % TENSOR_ALIGNMENT_BYTES
        if pad:
            entries[f"{_PAD_PREFIX}.{name}"] = {
                "dtype": "U8",
                "shape": [pad],
                "data_offsets": [offset, offset + pad],
            }
            offset += pad
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % TENSOR_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text, pads


class ShardReader:
    """A mapped weight file.

    Tensors are views of the mapping (private: writes do not reach the file).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise CorruptArtifact(
                    f"{path} is damaged (its header does not fit the file); rebuild the engine"
                )
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError):
                header = None
            if not isinstance(header, dict):
                raise CorruptArtifact(
                    f"{path} is damaged (its header is not JSON); rebuild the engine"
                ) from None
        self._start = 8 + length
        self._size = size
        self._entries = {
            k: v for k, v in header.items() if not k.startswith(_PAD_PREFIX) and k != "__metadata__"
        }
        self._storage = torch.UntypedStorage.from_file(str(path), False, size)

    def names(self) -> list[str]:
        """Return the names of the tensors in the file."""
        return list(self._entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a zero-copy view on the CPU.

        Raises:
            CorruptArtifact: if the entry exceeds the file.
        """
        try:
            entry = self._entries[name]
            dtype, shape = _TORCH_DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            begin, end = (self._start + int(o) for o in entry["data_offsets"])
            whole = (
                self._start <= begin
                and end <= self._size
                and end - begin == shape.numel() * dtype.itemsize
            )
            whole = whole and all(size >= 0 for size in shape)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
            whole = False
        if not whole or begin % dtype.itemsize:
            raise CorruptArtifact(
                f"{self.path}: the entry of {name} is damaged; rebuild the engine"
            )
        flat = torch.empty(0, dtype=dtype).set_(
            self._storage, begin // dtype.itemsize, (shape.numel(),)
        )  # type: ignore[call-overload]
        return flat.view(shape)

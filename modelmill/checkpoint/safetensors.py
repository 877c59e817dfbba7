"""Reads safetensors files, one or many with an index, after checking their headers.

The safetensors library maps the files and makes the tensors; header fields are checked here first,
so that every fault has one clear line that names the file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from modelmill.checkpoint.container import (
    ShardedFiles,
    TensorInfo,
    format_names,
    no_such_tensor_error,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote

INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes, the same limit as the library's."""

MAX_DIMENSIONS = 16
"""Real tensors have up to six; a product over millions of dimensions would take hours."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


class SafetensorsFiles(ShardedFiles):
    """The tensors of one or several safetensors files as one container.

    expected: tensor name -> file name, as in an index; checked against the files. Raises
    CorruptCheckpoint for a file that contradicts its size, itself, another shard or the index.
    """

    index_file = INDEX_FILE

    def __init__(self, paths: Sequence[Path], expected: Mapping[str, str] | None = None) -> None:
        super().__init__(paths)
        self._infos: dict[str, TensorInfo] = {}
        self._file_by_tensor: dict[str, Path] = {}
        self._open_files: dict[Path, Any] = {}
        for path in self._paths:
            infos, metadata = read_header(path)
            self.metadata.update(metadata)
            for info in infos:
                if info.name in self._file_by_tensor:
                    raise CorruptCheckpoint(
                        f"{path}: holds {quote(info.name)}, which "
                        f"{self._file_by_tensor[info.name].name} holds too"
                    )
                self._infos[info.name] = info
                self._file_by_tensor[info.name] = path
        self._check_index(expected or {})

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._infos)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        if name not in self._infos:
            raise no_such_tensor_error(self._paths[0].parent, name)
        return self._infos[name]

    def file_of_tensor(self, name: str) -> Path | None:
        """Return the file that has a tensor; None if none has it."""
        return self._file_by_tensor.get(name)

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor, backed by the mapped file."""
        if name not in self._file_by_tensor:
            raise no_such_tensor_error(self._paths[0].parent, name)
        path = self._file_by_tensor[name]
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(str(path), framework="pt", device="cpu")
            tensor: torch.Tensor = self._open_files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpoint(f"{path}: {quote(name)} cannot be read ({error})") from None
        return tensor

    def _check_index(self, expected: Mapping[str, str]) -> None:
        self._check_no_tensor_missing(expected, self._file_by_tensor)
        strays = [
            name for name, home in expected.items() if self._file_by_tensor[name].name != home
        ]
        if strays:
            index = self._paths[0].parent / INDEX_FILE
            raise CorruptCheckpoint(f"{index}: names the wrong shard for {format_names(strays)}")


def read_header(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """Return the tensors and the metadata in a safetensors header.

    Checked: the header fits the file and is JSON without repeated names; every dtype is known;
    every tensor's place matches its shape; places follow each other without gap or overlap and end
    where the file ends.

    Raises:
        CorruptCheckpoint: if a check fails.
        CheckpointError: for an unsupported dtype.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing")
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpoint(
                f"{path}: is no safetensors file or is truncated (it has {size} bytes, its header "
                "claims "
                f"{length if size >= 8 else 'at least 8'}); download it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: its header is not valid ({error})") from None
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"{path}: its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CorruptCheckpoint(f"{path}: its __metadata__ is no JSON object")
    places = [_parse_entry(path, name, entry) for name, entry in header.items()]
    _check_offsets(path, places, size - 8 - length)
    return [info for info, _ in places], metadata


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    pairs_by_key = dict(pairs)
    if len(pairs_by_key) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{quote(name)} appears twice")
    return pairs_by_key


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """Return one tensor's description and its offset after the header."""
    if not isinstance(entry, dict):
        raise CorruptCheckpoint(f"{path}: describes {quote(name)} by no JSON object")
    shape, place = (
        _nonnegative_ints_or_none(entry.get("shape")),
        _nonnegative_ints_or_none(entry.get("data_offsets")),
    )
    dtype = entry.get("dtype")
    if shape is None or place is None or len(place) != 2 or not isinstance(dtype, str):
        raise CorruptCheckpoint(f"{path}: gives {quote(name)} no proper dtype, shape and place")
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(
            f"{path}: {quote(name)} has the dtype {quote(dtype)}, which modelmill does not read"
        )
    dtype_ = TORCH_DTYPES[dtype]
    nbytes = math.prod(shape) * dtype_.itemsize
    # A dimension of 2**60 beside one of 0 is no real tensor; torch's strides would overflow on it.
    if place[1] - place[0] != nbytes or max(shape, default=0) >= 1 << 48:
        raise CorruptCheckpoint(
            f"{path}: {quote(name)} of shape {shape} and dtype {dtype} takes {nbytes} bytes, but "
            "its place has "
            f"{place[1] - place[0]}"
        )
    label = str(dtype_).removeprefix("torch.")
    return TensorInfo(name, tuple(shape), label, nbytes), place[0]


def _nonnegative_ints_or_none(value: Any) -> list[int] | None:
    """Return a short list of integers ≥ 0 (not bools) from a JSON value, else None."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    return value if all(type(item) is int and item >= 0 for item in value) else None


def _check_offsets(path: Path, entries: Sequence[tuple[TensorInfo, int]], data_bytes: int) -> None:
    end, before = 0, "the header"
    for info, start in sorted(entries, key=lambda place: (place[1], place[0].nbytes)):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            raise CorruptCheckpoint(f"{path}: {quote(info.name)} {what} {quote(before)}")
        end, before = start + info.nbytes, info.name
    if end > data_bytes:
        raise CorruptCheckpoint(
            f"{path}: is truncated: its tensors take {end} bytes, but only {data_bytes} are "
            "there; download it again"
        )
    if end < data_bytes:
        raise CorruptCheckpoint(f"{path}: has {data_bytes - end} bytes that belong to no tensor")

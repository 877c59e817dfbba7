"""Reads PyTorch's .pth and .bin files as tensors only; code in a file is never executed."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import ShardedFiles, TensorInfo, no_such_tensor_error
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote

INDEX_FILE = "pytorch_model.bin.index.json"

WRAPPER_KEYS = ("state_dict", "model", "module")
"""Keys under which training frameworks put the weights."""


class PthFiles(ShardedFiles):
    """The tensors of one or several PyTorch files as one container, mapped if possible.

    expected: tensor name -> file name, as in an index. Raises CheckpointError if a file contains
    more than tensors, CorruptCheckpoint if it is damaged.
    """

    index_file = INDEX_FILE

    def __init__(self, paths: Sequence[Path], expected: Mapping[str, str] | None = None) -> None:
        super().__init__(paths)
        self._tensors: dict[str, torch.Tensor] = {}
        for path in self._paths:
            for name, tensor in _load_tensors(path).items():
                if name in self._tensors:
                    raise CorruptCheckpoint(
                        f"{path}: holds {quote(name)}, which another shard holds too"
                    )
                self._tensors[name] = tensor
        self._check_no_tensor_missing(expected or {}, self._tensors)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        tensor = self.get(name)
        label = str(tensor.dtype).removeprefix("torch.")
        return TensorInfo(name, tuple(tensor.shape), label, tensor.numel() * tensor.itemsize)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        if name not in self._tensors:
            raise no_such_tensor_error(self._paths[0], name)
        return self._tensors[name]


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of one file by name; unwraps {"model": …} or {"state_dict": …}."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing")
    stored_bytes = _checked_archive_data_size(path)
    archive = stored_bytes is not None
    try:
        # mmap reads only the description; the old format (before torch 1.6) cannot be mapped.
        with warnings.catch_warnings():
            # torch's warnings about how it was written; errors are reported below
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True if archive else None
            )
    except Exception as error:
        # torch raises UnpicklingError, RuntimeError, EOFError, KeyError … for arbitrary bytes.
        message = str(error).lower()
        if "weights only load failed" in message and ("global" in message or "class" in message):
            raise CheckpointError(
                f"{path}: holds more than tensors, refusing to run its code; ask for a "
                "safetensors version"
            ) from None
        raise CorruptCheckpoint(
            f"{path}: is damaged or no PyTorch file ({type(error).__name__})"
        ) from None
    tensors = _unwrap_state_dict(path, content)
    if stored_bytes is not None:
        _check_storages(path, tensors, stored_bytes)
    return tensors


def _checked_archive_data_size(path: Path) -> int | None:
    """Return the bytes of an archive's tensors; None for the format before torch 1.6.

    A PyTorch archive stores its entries uncompressed: a compressed one is refused as a zip bomb.
    """
    try:
        if not zipfile.is_zipfile(path):
            return None
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CorruptCheckpoint(
            f"{path}: is damaged ({quote(str(error))}); download it again"
        ) from None
    size = path.stat().st_size
    if (
        any(e.compress_type != zipfile.ZIP_STORED for e in entries)
        or sum(e.file_size for e in entries) > size
    ):
        raise CorruptCheckpoint(
            f"{path}: has compressed entries, which PyTorch never writes; refusing it"
        )
    return sum(entry.file_size for entry in entries if "/data/" in entry.filename)


def _check_storages(path: Path, tensors: Mapping[str, torch.Tensor], stored_bytes: int) -> None:
    """Check that each mapped storage fits its entry and overlaps no other."""
    storages = {
        s.data_ptr(): s.nbytes()
        for s in (t.untyped_storage() for t in tensors.values())
        if s.nbytes()
    }
    end = 0
    for start, nbytes in sorted(storages.items()):
        if start < end:
            raise CorruptCheckpoint(f"{path}: is damaged: two of its tensors overlap")
        end = start + nbytes
    if sum(storages.values()) > stored_bytes:
        raise CorruptCheckpoint(
            f"{path}: is damaged: its tensors claim more bytes than the {stored_bytes} it stores"
        )


def _unwrap_state_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    if isinstance(content, dict):
        for key in WRAPPER_KEYS:
            inner = content.get(key)
            if isinstance(inner, dict) and any(isinstance(v, torch.Tensor) for v in inner.values()):
                content = inner
                break
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no table of named tensors")
    tensors = {
        str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{path}: {quote(name)} is no plain dense tensor; save it dense and unquantized"
            )
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CorruptCheckpoint(
                f"{path}: {quote(name)} claims more values than the file stores"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}

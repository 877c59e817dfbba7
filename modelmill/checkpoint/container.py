"""A container of weights: named tensors, one at a time, on the CPU; also of several files."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

from modelmill.checkpoint.side_files import read_shard_index
from modelmill.core.errors import CorruptCheckpoint, TensorMismatch
from modelmill.core.quoting import quote

MAX_LISTED_NAMES = 5
"""How many tensor names an error message lists."""

MAX_SHOWN_NAME_LENGTH = 200
"""Characters of a name in an error message: real names have some 60."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description, known without reading its values.

    Attributes:
        dtype: the torch name ("float16") or, for block formats, the ggml type ("Q4_1").
        nbytes: bytes of the values in the file; 0 if the view computes them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def decoded_dtype(self) -> torch.dtype:
        """Return the dtype that `get` returns; ggml block types are expanded to float32."""
        dtype = getattr(torch, self.dtype, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32


class Container(Protocol):
    """Named tensors in a file, in several files, or computed from another container.

    Tensors may be backed by a mapped file: callers must not write to them in place.
    """

    metadata: dict[str, Any]

    def names(self) -> list[str]:
        """Return every tensor's name, in the file's order."""

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape, dtype and size; raises TensorMismatch for an unknown name."""

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; raises TensorMismatch for an unknown name."""

    def files(self) -> list[Path]:
        """Return the files the values come from."""


class ConvertedContainer:
    """A container whose tensors are computed from those of another one.

    Subclasses set ``_names``, the names of its tensors in their order.
    """

    _names: list[str]

    def __init__(self, raw: Container) -> None:
        self._raw = raw
        self.metadata = raw.metadata

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return self._raw.files()


class ShardedFiles:
    """One or several files of tensors: the files, and the index that lists them.

    expected: tensor name -> file name, as in an index; subclasses check it.
    """

    index_file: ClassVar[str]

    def __init__(self, paths: Sequence[Path], expected: Mapping[str, str] | None = None) -> None:  # noqa: ARG002
        self._paths = sorted(paths)
        self.metadata: dict[str, Any] = {}

    @classmethod
    def from_index(cls, folder: Path) -> Self:
        """Open all shards in the folder's index."""
        expected = read_shard_index(folder / cls.index_file)
        return cls([folder / name for name in set(expected.values())], expected)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return list(self._paths)

    def _check_no_tensor_missing(self, expected: Collection[str], names: Collection[str]) -> None:
        """Check that the shards hold every tensor of the index.

        Raises:
            CorruptCheckpoint: if one is absent.
        """
        absent = [name for name in expected if name not in names]
        if absent:
            index = self._paths[0].parent / self.index_file
            raise CorruptCheckpoint(
                f"{index}: lists {len(absent)} tensor(s) no shard holds: {format_names(absent)}"
            )


def format_names(names: Collection[str]) -> str:
    """Return the first names for an error message, and the number of the others."""
    # Names in a file may contain any characters; an error stays one line.
    first = sorted(names)[:MAX_LISTED_NAMES]
    some = [
        name if name.isprintable() and len(name) <= MAX_SHOWN_NAME_LENGTH else quote(name)
        for name in first
    ]
    more = len(names) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def no_such_tensor_error(path: Path, name: str) -> TensorMismatch:
    """Return the error for a tensor name that the checkpoint lacks."""
    return TensorMismatch(f"{path}: holds no tensor named {quote(name)}")

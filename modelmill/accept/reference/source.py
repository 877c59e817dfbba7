"""Where a reference reads its weights: the raw container, under the names of the original model code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from modelmill.core.errors import TensorMismatch

# Rows of a vocabulary matrix that are widened to float at once.
BLOCK_ROWS = 4096


class Info(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Container(Protocol):
    """A checkpoint file or folder with its own names."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def names(self) -> list[str]: ...
    def info(self, name: str) -> Info: ...
    def get(self, name: str) -> Tensor: ...


class Opened(Protocol):
    """What the reference needs of an opened checkpoint."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def raw(self) -> Any: ...


class Source:
    """Tensors of a Hugging Face container; ``strip`` is what its names begin with ("model." or "").

    device: where tensors are put; they travel as they are stored and are widened there.
    """

    def __init__(
        self, container: Container, dtype: torch.dtype, strip: str = "", *, device: str | torch.device = "cpu"
    ) -> None:
        self.container = container
        self.dtype = dtype
        self.device = torch.device(device)
        self._names = frozenset(container.names())
        self._strip = strip
        self._read: set[str] = set()

    def raw_name(self, name: str) -> str:
        """The container's own name: as given, or without the outer prefix that some files lack."""
        if name not in self._names and self._strip and name.startswith(self._strip):
            return name[len(self._strip) :]
        return name

    def native(self, name: str) -> Tensor:
        """The tensor in its stored dtype (quantized ones expanded) and the original model's orientation."""
        raw = self.raw_name(name)
        if raw not in self._names:
            raise TensorMismatch(f"the checkpoint has no tensor {raw}; it is incomplete or of another family")
        self._read.add(raw)
        return self.container.get(raw)

    def unread(self) -> list[str]:
        """The container's tensors whose values nobody has asked for."""
        return sorted(self._names - self._read)

    def has(self, name: str) -> bool:
        """Whether the container holds this tensor."""
        return self.raw_name(name) in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it where the container knows."""
        raw = self.raw_name(name)
        if raw not in self._names:
            raise TensorMismatch(f"the checkpoint has no tensor {raw}; it is incomplete or of another family")
        return tuple(self.container.info(raw).shape)

    def alike(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers; read side by side, in blocks of rows."""
        if self.shape(name) != self.shape(other):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.row_blocks(name), self.row_blocks(other), strict=True))

    def get(self, name: str) -> Tensor:
        """The tensor in the reference's dtype."""
        return self._put(self.native(name))

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Some rows of a matrix, widened after they were picked."""
        return self._put(self.native(name)[index])

    def row_blocks(self, name: str) -> Iterator[Tensor]:
        """A matrix in blocks of rows, so that a vocabulary never lies in memory widened as a whole."""
        matrix = self.native(name)
        for start in range(0, matrix.shape[0], BLOCK_ROWS):
            yield self._put(matrix[start : start + BLOCK_ROWS])

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).to(self.dtype)

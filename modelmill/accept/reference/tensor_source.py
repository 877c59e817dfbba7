"""Reads a reference's weights: the raw container, under the names of the original code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from modelmill.core.errors import TensorMismatch

# Rows of a vocabulary matrix that are converted to float at a time.
BLOCK_ROWS = 4096


class HasShape(Protocol):
    """Description of a tensor, known before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor; [N, K] for a weight."""


class RawContainer(Protocol):
    """A checkpoint file or folder with its own names."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Return the checkpoint's metadata."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def tensor_info(self, name: str) -> HasShape:
        """Return shape and dtype of a tensor without reading it."""

    def get(self, name: str) -> Tensor:
        """Read one tensor by its name, in its stored dtype; a dequantized one in float64."""


class OpenedCheckpoint(Protocol):
    """The parts of an opened checkpoint that the reference uses."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the checkpoint's config."""

    @property
    def raw_container(self) -> Any:
        """Return the container below, with tensors as stored."""


class TensorSource:
    """Tensors of a Hugging Face container.

    name_prefix: prefix of its names ("model." or ""). device: where tensors are placed; they are
    transferred in the stored dtype and converted there.
    """

    def __init__(
        self,
        container: RawContainer,
        dtype: torch.dtype,
        name_prefix: str = "",
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        self.container = container
        self.dtype = dtype
        self.device = torch.device(device)
        self._names = frozenset(container.names())
        self._name_prefix = name_prefix
        self._read_names: set[str] = set()

    def stored_tensor_name(self, name: str) -> str:
        """Return the container's name, with or without the outer prefix that some files lack."""
        if name not in self._names and self._name_prefix and name.startswith(self._name_prefix):
            return name[len(self._name_prefix) :]
        return name

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor in its stored dtype, in the original model's orientation.

        Quantized tensors are expanded.
        """
        raw = self.stored_tensor_name(name)
        if raw not in self._names:
            raise TensorMismatch(
                f"the checkpoint has no tensor {raw}; it is incomplete or of another family"
            )
        self._read_names.add(raw)
        return self.container.get(raw)

    def unread_tensor_names(self) -> list[str]:
        """Return the container's tensors that have not been read."""
        return sorted(self._names - self._read_names)

    def has(self, name: str) -> bool:
        """Return whether the container has this tensor."""
        return self.stored_tensor_name(name) in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape, without reading it if possible."""
        raw = self.stored_tensor_name(name)
        if raw not in self._names:
            raise TensorMismatch(
                f"the checkpoint has no tensor {raw}; it is incomplete or of another family"
            )
        return tuple(self.container.tensor_info(raw).shape)

    def have_equal_values(self, name: str, other: str) -> bool:
        """Return whether two tensors have equal values, read in blocks of rows."""
        if self.shape(name) != self.shape(other):
            return False
        return all(
            torch.equal(a, b)
            for a, b in zip(self.row_blocks(name), self.row_blocks(other), strict=True)
        )

    def get(self, name: str) -> Tensor:
        """Return the tensor in the reference's dtype."""
        return self._to_reference_dtype(self.read_uncast_tensor(name))

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Return some rows of a matrix, converted after selection."""
        return self._to_reference_dtype(self.read_uncast_tensor(name)[index])

    def row_blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a matrix in blocks of rows, so that a vocabulary is never converted as a whole."""
        matrix = self.read_uncast_tensor(name)
        for start in range(0, matrix.shape[0], BLOCK_ROWS):
            yield self._to_reference_dtype(matrix[start : start + BLOCK_ROWS])

    def _to_reference_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).to(self.dtype)

"""Where a reference reads its weights: the raw container, under the names of the original model
code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from modelmill.core.errors import TensorMismatch

# Rows of a vocabulary matrix that are widened to float at once.
BLOCK_ROWS = 4096


class TensorShape(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class RawContainer(Protocol):
    """A checkpoint file or folder with its own names."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorShape: ...
    def get(self, name: str) -> Tensor: ...


class OpenedCheckpoint(Protocol):
    """What the reference needs of an opened checkpoint."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def raw(self) -> Any: ...


class TensorSource:
    """Tensors of a Hugging Face container; ``name_prefix`` is what its names begin with ("model."
    or "").

    device: where tensors are put; they travel as they are stored and are widened there.
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

    def raw_name(self, name: str) -> str:
        """The container's own name: as given, or without the outer prefix that some files lack."""
        if name not in self._names and self._name_prefix and name.startswith(self._name_prefix):
            return name[len(self._name_prefix) :]
        return name

    def stored_tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype (quantized ones expanded) and the original model's
        orientation.
        """
        raw = self.raw_name(name)
        if raw not in self._names:
            raise TensorMismatch(
                f"the checkpoint has no tensor {raw}; it is incomplete or of another family"
            )
        self._read_names.add(raw)
        return self.container.get(raw)

    def unread(self) -> list[str]:
        """The container's tensors whose values nobody has asked for."""
        return sorted(self._names - self._read_names)

    def has(self, name: str) -> bool:
        """Whether the container holds this tensor."""
        return self.raw_name(name) in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it where the container knows."""
        raw = self.raw_name(name)
        if raw not in self._names:
            raise TensorMismatch(
                f"the checkpoint has no tensor {raw}; it is incomplete or of another family"
            )
        return tuple(self.container.info(raw).shape)

    def equal_values(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers; read side by side, in blocks of rows."""
        if self.shape(name) != self.shape(other):
            return False
        return all(
            torch.equal(a, b)
            for a, b in zip(self.row_blocks(name), self.row_blocks(other), strict=True)
        )

    def get(self, name: str) -> Tensor:
        """The tensor in the reference's dtype."""
        return self._to_reference_dtype(self.stored_tensor(name))

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Some rows of a matrix, widened after they were picked."""
        return self._to_reference_dtype(self.stored_tensor(name)[index])

    def row_blocks(self, name: str) -> Iterator[Tensor]:
        """A matrix in blocks of rows, so that a vocabulary never lies in memory widened as a
        whole.
        """
        matrix = self.stored_tensor(name)
        for start in range(0, matrix.shape[0], BLOCK_ROWS):
            yield self._to_reference_dtype(matrix[start : start + BLOCK_ROWS])

    def _to_reference_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).to(self.dtype)

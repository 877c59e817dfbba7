"""What every container of weights offers: named tensors, one at a time, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from modelmill.core.errors import TensorMismatch
from modelmill.core.quoting import quote

MAX_LISTED_NAMES = 12
"""How many tensor names an error line spells out before it only counts the rest."""

MAX_NAME_LENGTH = 200
"""Characters of a name that an error line shows: real names have some 60."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its container describes it, known without reading its values.

    dtype: the torch name ("float16") or, where values are stored in blocks, the ggml type ("Q4_1").
    nbytes: bytes the values take in the file; 0 where the view computes them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `get` returns: ggml block types are expanded to float32."""
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else torch.float32


class Container(Protocol):
    """Named tensors in a file, in several files, or computed from another container.

    Tensors may be backed by a mapped file: callers must not write to them in place.
    """

    metadata: dict[str, Any]

    def names(self) -> list[str]:
        """Every tensor's name, in the file's order."""

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and size; raises TensorMismatch for an unknown name."""

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; raises TensorMismatch for an unknown name."""

    def files(self) -> list[Path]:
        """The files the values come from."""


def list_names(names: Collection[str]) -> str:
    """Up to a dozen names for an error line, then how many more there are."""
    # A file's names may hold anything; an error stays one line.
    first = sorted(names)[:MAX_LISTED_NAMES]
    some = [
        name if name.isprintable() and len(name) <= MAX_NAME_LENGTH else quote(name)
        for name in first
    ]
    more = len(names) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def no_such_tensor(path: Path, name: str) -> TensorMismatch:
    return TensorMismatch(f"{path}: holds no tensor named {quote(name)}")

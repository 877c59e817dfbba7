"""A base checkpoint plus a published difference (Vicuna's deltas), added tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, format_names
from modelmill.core.errors import TensorMismatch

VOCABULARY_TENSORS = ("embed_tokens", "lm_head", "wte")
"""Tensors with a row per token: only these may have more rows in the delta than in the base."""

INV_FREQ_BUFFER = "rotary_emb.inv_freq"
"""A computed buffer that old files save: taken from either side, may be missing."""

CHUNK_ROWS = 4096


class DeltaContainer:
    """base + delta under Hugging Face names.

    Rows that only the delta has (added tokens) are copied. The sum is computed in float32 and
    rounded once to the wider dtype of the two. Raises TensorMismatch if names or shapes do not
    match.
    """

    def __init__(self, base: Container, delta: Container) -> None:
        self._base, self._delta = base, delta
        self.metadata: dict[str, Any] = {**base.metadata, **delta.metadata}
        first, second = set(base.names()), set(delta.names())
        alone = {name for name in first ^ second if not name.endswith(INV_FREQ_BUFFER)}
        if alone:
            raise TensorMismatch(
                f"base and delta do not belong together: {len(alone)} tensor(s) are in one of "
                "them only: "
                f"{format_names(alone)}"
            )
        self._delta_names = second
        self._names = [name for name in delta.names() if name in first]
        self._names += [name for name in base.names() if name not in second]
        for name in self._names:
            if name in second:
                self._check_delta_shape(base.tensor_info(name), delta.tensor_info(name))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        one = self._base.tensor_info(name)
        if name not in self._delta_names:
            return one
        other = self._delta.tensor_info(name)
        dtype = torch.promote_types(one.decoded_dtype, other.decoded_dtype)
        nbytes = other.numel * dtype.itemsize
        return TensorInfo(name, other.shape, str(dtype).removeprefix("torch."), nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        one = self._base.get(name)
        if name not in self._delta_names:
            return one
        other = self._delta.get(name)
        dtype = torch.promote_types(one.dtype, other.dtype)
        result = torch.empty(other.shape, dtype=dtype)
        if result.dim() == 0:
            return (one.float() + other.float()).to(dtype)
        rows = one.shape[0]
        for start in range(0, rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, rows)
            result[start:stop] = one[start:stop].float() + other[start:stop].float()
        result[rows:] = other[rows:]
        return result

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return [*self._base.files(), *self._delta.files()]

    def _check_delta_shape(self, one: TensorInfo, other: TensorInfo) -> None:
        if one.shape == other.shape:
            return
        grows = (
            len(one.shape) == 2
            and one.shape[1:] == other.shape[1:]
            and one.shape[0] < other.shape[0]
        )
        if not (grows and any(part in one.name for part in VOCABULARY_TENSORS)):
            raise TensorMismatch(
                f"{one.name} is {list(one.shape)} in the base but {list(other.shape)} in the "
                "delta; "
                "is this the delta of another model?"
            )

"""How a weight is held: the contract, and the folder as registry.

A kind of weight is a file ``weights/<kind>.py`` with a class ``Held`` that has the attributes below. ``nn.Linear``
delegates to it and knows nothing else about quantization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.core.find import find, names
from modelmill.core.quote import quoted
from modelmill.ops.eight_bit import Wanted
from modelmill.ops.shelf import Ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What activations, and weights that nothing rounds, may be."""

Layout = dict[str, tuple[int, tuple[torch.dtype, ...]]]
"""Dimensions and dtypes of what a kind stores, by suffix."""

# shape and dtype of each stored tensor, by suffix
PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]


class HeldWeight(Protocol):
    """A matrix [N, K] in some form.

    kind: the file's name. pack: from a dense float matrix. tensors: what is stored, by suffix. from_tensors: the
    inverse. matmul: [T, K] → [T, N]. gated: the same and SwiGLU's gate, where one op does both. dense: the matrix that
    is really multiplied with, float32. slice: some stretches of its rows and one of its columns, for several ranks;
    grain: the multiples at which columns may be cut.

    Optional, where one op does a product and what stands beside it: ``added`` (the residual behind), ``matmul_gated``
    (SwiGLU's gate in front), ``rotated`` (rotation and the cache's pages); each gives None where there is no such op.

    A kind that multiplies with activations in 8 bits also has ``wants``, what a norm in front may put out at once
    (``matmul`` then takes that, too), and ``seen(x)``, the x that is really multiplied with, in x's dtype.
    """

    @property
    def kind(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def grain(self) -> int: ...

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor: ...

    def gated(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def dense(self) -> torch.Tensor: ...

    def to(self, device: str) -> HeldWeight: ...

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> HeldWeight: ...


def wanted(weight: HeldWeight) -> Wanted | None:
    """The 8-bit input that a norm may make for a weight; None: it takes floating point."""
    return getattr(weight, "wants", None)


def seen(weight: HeldWeight, x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as a weight's product takes it: itself, or what rounding to 8 bits leaves of it."""
    rounds = getattr(weight, "seen", None)
    return x if rounds is None else rounds(x)


def pack(kind: str, weight: torch.Tensor, dtype: torch.dtype, **layout: Any) -> HeldWeight:
    """Hold a dense weight [N, K] as ``kind``; ``dtype`` is the activations' type; layout: the kind's own options."""
    return _kind(kind).pack(weight, dtype, **layout)


def from_tensors(kind: str, tensors: Mapping[str, torch.Tensor]) -> HeldWeight:
    """The weight whose ``tensors()`` were stored.

    Raises CorruptArtifact for tensors of another layout than the kind stores (a kind's ``LAYOUT``: suffix → dimensions
    and dtypes), KeyError with the suffix of one that is missing.
    """
    held = _kind(kind)
    layout: Mapping[str, tuple[int, tuple[torch.dtype, ...]]] | None = getattr(held, "LAYOUT", None)
    for suffix, tensor in tensors.items():
        if layout is None:
            break
        if suffix not in layout:
            raise CorruptArtifact(f"a weight of kind {kind} has no part {quoted(suffix, 60)}; rebuild the engine")
        dims, dtypes = layout[suffix]
        if tensor.dim() != dims or tensor.dtype not in dtypes:
            stored = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
            raise CorruptArtifact(f"{suffix} of a weight of kind {kind} is stored as {stored}; rebuild the engine")
    return held.from_tensors(tensors)


def packed_info(kind: str, shape: tuple[int, int], dtype: torch.dtype, **layout: Any) -> PackedInfo:
    """Shapes and dtypes of the tensors that ``pack`` of a matrix of this shape stores, by suffix."""
    return _kind(kind).packed_info(shape, dtype, **layout)


def cut(tensor: torch.Tensor, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None) -> torch.Tensor:
    """Stretches of rows, one after another, of [N, …], and a stretch of columns: a view where it can be."""
    parts = [tensor[a:b] if columns is None else tensor[a:b, columns[0] : columns[1]] for a, b in rows]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _kind(kind: str):  # type: ignore[no-untyped-def]
    module = find("modelmill.weights", kind)
    if module is None or not hasattr(module, "Held"):
        known = ", ".join(n for n in names("modelmill.weights") if n != "held")
        raise IncompatibleArtifact(f"weights of kind {kind!r} are not known here (known: {known}); rebuild the engine")
    return module.Held

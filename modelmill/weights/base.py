"""How a weight is held: the contract, and the folder as registry.

A weight format is a file ``weights/<format>.py`` with a class whose ``format`` is the file's name
and that has the attributes below. ``nn.Linear``
delegates to it and knows nothing else about quantization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.core.quoting import quote
from modelmill.core.registry import find_module, module_names
from modelmill.ops.linear import AMX_COLUMNS
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.registry import Ops

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What activations, and weights that nothing rounds, may be."""

TensorLayout = dict[str, tuple[int, tuple[torch.dtype, ...]]]
"""Dimensions and dtypes of what a format stores, by suffix."""
# Of the memory that is free at load, what expanded weights may take: the rest is for the KV cache
# and for steps.
UNPACKED_MEMORY_FRACTION = 0.6

# shape and dtype of each stored tensor, by suffix
PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]


class WeightFormat(Protocol):
    """A matrix [N, K] in some form.

    format: the file's name. pack: from a dense float matrix. tensors: what is stored, by suffix.
    from_tensors: the inverse. matmul: [T, K] → [T, N]. try_linear_swiglu: the same and SwiGLU's
    gate, where one op does both. dense: the matrix that is really multiplied with, float32. slice:
    some stretches of its rows and one of its columns, for several ranks; alignment: the multiples
    at which columns may be cut.

    Optional, where one op does a product and what stands beside it: ``try_linear_add`` (the
    residual behind), ``try_swiglu_quant`` (SwiGLU's gate in front), ``try_qkv_rope`` (rotation and
    the cache's pages); each gives None where there is no such op.

    A format that multiplies with activations in 8 bits also has ``act_quant``, what a norm in front
    may put out at once (``matmul`` then takes that, too), and ``fake_quantize(x)``, the x that is
    really multiplied with, in x's dtype.

    A format whose torch reference turns its stored numbers into wider ones in every call has
    ``UNPACKS``, and ``unpack(dtype)``: the same weight with those numbers in the place of the
    stored ones, for activations of
    ``dtype``. Its products are the same to the bit; only ``matmul`` may be asked of it (see
    ``UnpackedWeight``).
    """

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def alignment(self) -> int: ...

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor: ...

    def try_linear_swiglu(
        self, x: Any, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def dense(self) -> torch.Tensor: ...

    def to(self, device: str) -> WeightFormat: ...

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat: ...


class UnpackSpec(NamedTuple):
    """op: whose torch reference expands; dtype: of what it multiplies with, None: the
    activations'.
    """

    op: str
    dtype: torch.dtype | None


@dataclass(frozen=True)
class UnpackedWeight:
    """A weight beside the numbers that its torch reference multiplies with, made once instead of in
    every call.

    packed: the weight as it is in the engine, for everything but products. unpacked: what it is
    multiplied as.
    """

    packed: WeightFormat
    unpacked: Any

    @property
    def format(self) -> str:
        return self.packed.format

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def alignment(self) -> int:
        return self.packed.alignment

    @property
    def act_quant(self) -> ActQuantSpec | None:
        return act_quant(self.packed)

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return self.unpacked.matmul(x, bias, ops)

    def try_swiglu_quant(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        joined = getattr(self.unpacked, "try_swiglu_quant", None)
        return None if joined is None else joined(gate_up, bias, ops)

    def try_linear_swiglu(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002  torch has none
        return None

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantize(self.packed, x)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.packed.tensors()

    def dense(self) -> torch.Tensor:
        return self.packed.dense()

    def to(self, device: str) -> WeightFormat:
        return self.packed.to(device)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat:
        return self.packed.slice(rows, columns)


def unpack_spec(weight: WeightFormat) -> UnpackSpec | None:
    """What the weight's torch reference expands in every call; None where it multiplies with what
    is stored.
    """
    how = "UNPACKS_FLOAT_INPUT" if getattr(weight, "float_input", False) else "UNPACKS"
    found: UnpackSpec | None = getattr(weight, how, None)
    return None if isinstance(weight, UnpackedWeight) else found


def unpacked_size(
    weight_format: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[str, int] | None:
    """(op, bytes) of a weight of this format, as ``unpack_spec`` tells of one that exists; None:
    nothing is expanded."""
    found: UnpackSpec | None = getattr(_format_class(weight_format), "UNPACKS", None)
    return (
        None if found is None else (found.op, shape[0] * shape[1] * (found.dtype or dtype).itemsize)
    )


def unpacked_tensors(weight: WeightFormat) -> list[torch.Tensor]:
    """What a weight's expanded parts take beside what is stored."""
    if isinstance(weight, UnpackedWeight):
        return [weight.unpacked.weight]
    return [tensor for part in getattr(weight, "parts", ()) for tensor in unpacked_tensors(part)]


def pad_columns(weight: torch.Tensor) -> torch.Tensor:
    """16-bit rows filled up with zeros, as ``ops.linear`` would in every call."""
    return (
        F.pad(weight, (0, -weight.shape[1] % AMX_COLUMNS)) if weight.dtype.itemsize == 2 else weight
    )


def act_quant(weight: WeightFormat) -> ActQuantSpec | None:
    """The 8-bit input that a norm may make for a weight; None: it takes floating point."""
    return getattr(weight, "act_quant", None)


def fake_quantize(weight: WeightFormat, x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as a weight's product takes it: itself, or what rounding to 8 bits leaves of it."""
    rounds = getattr(weight, "fake_quantize", None)
    return x if rounds is None else rounds(x)


def pack(
    weight_format: str, weight: torch.Tensor, dtype: torch.dtype, **layout: Any
) -> WeightFormat:
    """Hold a dense weight [N, K] as ``weight_format``; dtype: of the activations; layout: the
    format's own options.
    """
    return _format_class(weight_format).pack(weight, dtype, **layout)


def from_tensors(weight_format: str, tensors: Mapping[str, torch.Tensor]) -> WeightFormat:
    """The weight whose ``tensors()`` were stored.

    Raises CorruptArtifact for tensors of another layout than the format stores (a format's
    ``LAYOUT``: suffix → dimensions and dtypes), KeyError with the suffix of one that is missing.
    """
    format_class = _format_class(weight_format)
    layout: Mapping[str, tuple[int, tuple[torch.dtype, ...]]] | None = getattr(
        format_class, "LAYOUT", None
    )
    for suffix, tensor in tensors.items():
        if layout is None:
            break
        if suffix not in layout:
            raise CorruptArtifact(
                f"a weight of kind {weight_format} has no part {quote(suffix, 60)}; rebuild the "
                "engine"
            )
        dims, dtypes = layout[suffix]
        if tensor.dim() != dims or tensor.dtype not in dtypes:
            stored = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
            raise CorruptArtifact(
                f"{suffix} of a weight of kind {weight_format} is stored as {stored}: damaged; "
                "rebuild the engine"
            )
    return format_class.from_tensors(tensors)


def packed_info(
    weight_format: str, shape: tuple[int, int], dtype: torch.dtype, **layout: Any
) -> PackedInfo:
    """Shapes and dtypes of the tensors that ``pack`` of a matrix of this shape stores, by
    suffix.
    """
    return _format_class(weight_format).packed_info(shape, dtype, **layout)


def slice_tensor(
    tensor: torch.Tensor, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Stretches of rows, one after another, of [N, …], and a stretch of columns: a view where it
    can be.
    """
    parts = [
        tensor[a:b] if columns is None else tensor[a:b, columns[0] : columns[1]] for a, b in rows
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _format_class(weight_format: str) -> Any:
    """The class of ``weights/<weight_format>.py`` that is called so."""
    module = find_module("modelmill.weights", weight_format)
    for cls in vars(module).values() if module is not None else ():
        if isinstance(cls, type) and vars(cls).get("format") == weight_format:
            return cls
    known = ", ".join(n for n in module_names("modelmill.weights") if n != "base")
    raise IncompatibleArtifact(
        f"weights of kind {weight_format!r} are not known here (known: {known}); rebuild the engine"
    )

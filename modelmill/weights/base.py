"""The interface of a weight format, and the functions that find a format by its name.

A weight format is a file ``weights/<format>.py`` with a class whose ``format`` is the file's name
and that has the attributes below. ``nn.Linear`` calls only this interface and does not depend on a
quantization.
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
"""Dtypes of activations and of unquantized weights."""

TensorLayout = dict[str, tuple[int, tuple[torch.dtype, ...]]]
"""Dimensions and dtypes of the tensors that a format stores, by suffix."""
# Largest fraction of the memory free at load that expanded weights may use; the rest is for the KV
# cache and for steps.
UNPACKED_MEMORY_FRACTION = 0.6

# Shape and dtype of each stored tensor, by suffix.
PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]


class WeightFormat(Protocol):
    """A matrix [N, K] in one storage format.

    Besides the members below, a class has ``pack`` (quantize a dense float matrix),
    ``from_tensors`` (the inverse of ``tensors``) and ``packed_info`` (shapes and dtypes of what
    ``pack`` stores).

    Optional fused ops, each of which returns None if no backend has such an op: ``try_linear_add``
    (product and residual add), ``try_swiglu_quant`` (SwiGLU's gate, quantization and product),
    ``try_qkv_rope`` (product, RoPE and the store into the KV cache).

    A format that quantizes its input to 8 bits also has ``act_quant``, the activation quant spec
    that a fused norm may produce (``matmul`` then also takes a ``QuantizedInput``), and
    ``fake_quantize(x)``, x rounded as the product uses it, in x's dtype.

    A format whose torch reference expands the stored numbers in every call has ``UNPACKS`` and
    ``unpack(dtype)``: the same weight with the expanded numbers stored instead, for activations of
    ``dtype``. Its products are equal to the bit; only ``matmul`` may be called on it (see
    ``UnpackedWeight``).
    """

    @property
    def format(self) -> str:
        """Return the name of the weight format."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""

    @property
    def alignment(self) -> int:
        """Return the multiple at which columns may be cut."""

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""

    def try_linear_swiglu(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""

    def dense(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""

    def to(self, device: str) -> WeightFormat:
        """Return a copy on the device."""

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat:
        """Return the given row ranges and one column range, for one rank."""


class UnpackSpec(NamedTuple):
    """Op whose torch reference expands a weight.

    Attributes:
        op: name of the op.
        dtype: dtype of the expanded weight; None for the activations' dtype.
    """

    op: str
    dtype: torch.dtype | None


@dataclass(frozen=True)
class UnpackedWeight:
    """A weight together with the expanded form that its torch reference multiplies.

    The weight is expanded once instead of in each call.

    Attributes:
        packed: the weight as stored, used for everything but products.
        unpacked: the expanded weight, used for products.
    """

    packed: WeightFormat
    unpacked: Any

    @property
    def format(self) -> str:
        """Return the name of the weight format."""
        return self.packed.format

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.packed.shape

    @property
    def alignment(self) -> int:
        """Return the multiple at which columns may be cut."""
        return self.packed.alignment

    @property
    def act_quant(self) -> ActQuantSpec | None:
        """Return how the input is quantized, or None for a float input."""
        return act_quant(self.packed)

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.unpacked.matmul(x, bias, ops)

    def try_swiglu_quant(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute SwiGLU's gate, quantize and multiply, or return None without a fused op."""
        fused = getattr(self.unpacked, "try_swiglu_quant", None)
        return None if fused is None else fused(gate_up, bias, ops)

    def try_linear_swiglu(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002  the torch reference has no fused op
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        return None

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rounded as the product uses it, in x's dtype."""
        return fake_quantize(self.packed, x)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return self.packed.tensors()

    def dense(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return self.packed.dense()

    def to(self, device: str) -> WeightFormat:
        """Return a copy on the device."""
        return self.packed.to(device)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat:
        """Return the given row ranges and one column range, for one rank."""
        return self.packed.slice(rows, columns)


def unpack_spec(weight: WeightFormat) -> UnpackSpec | None:
    """Return the op that expands this weight in every call, or None if no op does."""
    attribute = "UNPACKS_FLOAT_INPUT" if getattr(weight, "float_input", False) else "UNPACKS"
    spec: UnpackSpec | None = getattr(weight, attribute, None)
    return None if isinstance(weight, UnpackedWeight) else spec


def unpacked_size(
    weight_format: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[str, int] | None:
    """Return (op, bytes) of the expanded form of a weight of this format, or None if there is none.

    It is the counterpart of ``unpack_spec`` for a weight that does not exist yet.
    """
    spec: UnpackSpec | None = getattr(_format_class(weight_format), "UNPACKS", None)
    return None if spec is None else (spec.op, shape[0] * shape[1] * (spec.dtype or dtype).itemsize)


def unpacked_tensors(weight: WeightFormat) -> list[torch.Tensor]:
    """Return the tensors that the expanded form holds in addition to the stored ones."""
    if isinstance(weight, UnpackedWeight):
        return [weight.unpacked.weight]
    return [tensor for part in getattr(weight, "parts", ()) for tensor in unpacked_tensors(part)]


def pad_columns(weight: torch.Tensor) -> torch.Tensor:
    """Pad 16-bit rows with zeros, once instead of in each call of ``ops.linear``."""
    return (
        F.pad(weight, (0, -weight.shape[1] % AMX_COLUMNS)) if weight.dtype.itemsize == 2 else weight
    )


def act_quant(weight: WeightFormat) -> ActQuantSpec | None:
    """Return the quant spec of the weight's input, or None if it takes a float input."""
    return getattr(weight, "act_quant", None)


def fake_quantize(weight: WeightFormat, x: torch.Tensor) -> torch.Tensor:
    """Return x [T, K] as the weight's product uses it: rounded to 8 bits and back, or unchanged."""
    rounds = getattr(weight, "fake_quantize", None)
    return x if rounds is None else rounds(x)


def pack(
    weight_format: str, weight: torch.Tensor, dtype: torch.dtype, **layout: Any
) -> WeightFormat:
    """Store a dense weight [N, K] as ``weight_format``.

    Args:
        weight_format: name of the format.
        weight: [N, K], floating point.
        dtype: dtype of the activations.
        **layout: options of the format.
    """
    return _format_class(weight_format).pack(weight, dtype, **layout)


def from_tensors(weight_format: str, tensors: Mapping[str, torch.Tensor]) -> WeightFormat:
    """Build a weight from its stored ``tensors()``.

    Raises:
        CorruptArtifact: if a tensor differs from the format's ``LAYOUT`` (suffix → dimensions and
            dtypes).
        KeyError: with the suffix of a missing tensor.
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
                f"a weight of format {weight_format} has no part {quote(suffix, 60)}; rebuild the "
                "engine"
            )
        dims, dtypes = layout[suffix]
        if tensor.dim() != dims or tensor.dtype not in dtypes:
            stored = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
            raise CorruptArtifact(
                f"{suffix} of a weight of format {weight_format} is stored as {stored}: damaged; "
                "rebuild the engine"
            )
    return format_class.from_tensors(tensors)


def packed_info(
    weight_format: str, shape: tuple[int, int], dtype: torch.dtype, **layout: Any
) -> PackedInfo:
    """Return shapes and dtypes, by suffix, of the tensors that ``pack`` stores for this shape."""
    return _format_class(weight_format).packed_info(shape, dtype, **layout)


def slice_tensor(
    tensor: torch.Tensor, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return row ranges of [N, …], concatenated, and one column range; a view where possible."""
    parts = [
        tensor[a:b] if columns is None else tensor[a:b, columns[0] : columns[1]] for a, b in rows
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _format_class(weight_format: str) -> Any:
    """Return the class of ``weights/<weight_format>.py``."""
    module = find_module("modelmill.weights", weight_format)
    for cls in vars(module).values() if module is not None else ():
        if isinstance(cls, type) and vars(cls).get("format") == weight_format:
            return cls
    known = ", ".join(n for n in module_names("modelmill.weights") if n != "base")
    raise IncompatibleArtifact(
        f"the weight format {weight_format!r} is not supported (supported: {known}); "
        "rebuild the engine"
    )

"""The interface of a weight format, and the functions that find a format by its name.

A weight format is a file ``weights/<format>.py`` with a subclass of ``WeightFormat`` whose
``format`` is the file's name; a format that one recipe alone writes may stand in the recipe's file,
if both have one name. ``nn.Linear`` calls only this interface and does not depend on a
quantization.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.core.quoting import quote
from modelmill.ops.bound_op import CachedOpBinding, SelectedOp
from modelmill.ops.linear import AMX_K_ALIGNMENT
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.registry import Ops
from modelmill.ops.rope_cache import RopeCacheInputs

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of activations and of unquantized weights."""

StoredTensorDimsAndDtypes = dict[str, tuple[int, tuple[torch.dtype, ...]]]
"""Dimensions and dtypes of the tensors that a format stores, by suffix."""
# Largest fraction of the memory free at load that expanded weights may use; the rest is for the KV
# cache and for steps.
UNPACKED_MEMORY_FRACTION = 0.6

# Shape and dtype of each stored tensor, by suffix.
PackedTensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
# A row goes far beyond a static range where it leaves the range times this: a few values of any
# text lie a little beyond those of calibration.
STATIC_RANGE_MARGIN_FACTOR = 1.3


class UpcastSpec(NamedTuple):
    """Op whose torch reference expands a weight.

    Attributes:
        op: name of the op.
        dtype: dtype of the expanded weight; None for the activations' dtype.
    """

    op: str
    dtype: torch.dtype | None


class WeightFormat(ABC):
    """A matrix [N, K] in one storage format.

    A subclass is a frozen dataclass with a field ``format``, whose default is the format's name.
    What a format does not have keeps the default of this class: no caller asks whether a member
    exists.

    Attributes:
        STORED_TENSORS: dimensions and dtypes of the stored tensors; None: ``from_tensors`` checks
            them.
        UNPACKS: the op whose torch reference expands the stored numbers in every call, if there
            is one; the format then has ``unpack``.
        QUANTIZES_INPUT: whether the format may quantize its input (``fake_quantize_input``).
    """

    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes | None] = None
    UNPACKS: ClassVar[UpcastSpec | None] = None
    QUANTIZES_INPUT: ClassVar[bool] = False

    @property
    @abstractmethod
    def format(self) -> str:
        """Return the name of the weight format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""

    @property
    def column_slice_alignment(self) -> int:
        """Return the multiple at which columns may be cut."""
        return 1

    @property
    def input_quant_spec(self) -> ActQuantSpec | None:
        """Return the quant spec that a fused norm may produce, or None for a float input.

        ``matmul`` of a weight with a spec also takes a ``QuantizedInput``.
        """
        return None

    @property
    def upcast_spec(self) -> UpcastSpec | None:
        """Return the op that expands this weight in every call, or None if no op does."""
        return self.UNPACKS

    # The parameters behind the weight and its dtype are the format's own options.
    @classmethod
    def pack(cls, *args: Any, **layout: Any) -> WeightFormat:
        """Quantize a dense float matrix [N, K] for activations of a dtype."""
        raise NotImplementedError(f"{cls.__name__} stores a checkpoint's numbers only")

    @classmethod
    def packed_tensor_specs(cls, *args: Any, **layout: Any) -> PackedTensorSpecs:
        """Return shapes and dtypes of what ``pack`` stores for a shape and a dtype."""
        raise NotImplementedError(f"{cls.__name__} stores a checkpoint's numbers only")

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> WeightFormat:
        """Build the weight from its stored tensors by suffix."""

    @abstractmethod
    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""

    @abstractmethod
    def to(self, device: str) -> WeightFormat:
        """Return a copy on the device."""

    @abstractmethod
    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat:
        """Return the given row ranges and one column range, for one rank."""

    def fake_quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] as the product uses it: rounded to 8 bits and back, or unchanged."""
        return x

    def input_row_outside_range_mask(self, x: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002  no range
        """Return [T] bool: which rows of x [T, K] go far beyond the static range of the input.

        None without such a range, which is widened by ``STATIC_RANGE_MARGIN_FACTOR`` around its
        centre. What becomes of such a row is the format's own: its values are clipped, or it is
        rounded with longer steps.
        """
        return None

    def unpack(self, dtype: torch.dtype) -> WeightFormat:
        """Return the weight with its values expanded for activations of dtype.

        Its products are equal to the bit; only ``matmul`` and the fused ops may be called on it
        (see ``PackedAndUnpackedWeight``).
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to expand for {dtype}")

    @cached_property
    def _bound_ops(self) -> dict[str, CachedOpBinding]:
        """The ops bound to this weight, by name; those of other backends replace them."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields: a copy binds its own ops."""
        return {name: value for name, value in vars(self).items() if name != "_bound_ops"}

    def run_bound_op(self, op: Callable[..., Any], *args: Any) -> Any:
        """Run an op on this weight; which kernel serves it is chosen in the first call.

        Args:
            op: one of the device's ``Ops``.
            *args: the op's arguments: this weight's tensors and what is multiplied by them.

        Returns:
            What the op returns.
        """
        if not isinstance(op, SelectedOp):
            return op(*args)
        binding = self._bound_ops.get(op.name)
        if binding is None:
            binding = self._bound_ops[op.name] = CachedOpBinding()
        return binding(op, *args)

    def row_block_weights(self) -> tuple[WeightFormat, ...]:
        """Return the matrices that it consists of, from the first rows on; itself by default."""
        return (self,)

    def extra_unpacked_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that an expanded form holds in addition to the stored ones."""
        return []

    def cluster_counts(self) -> dict[str, int]:
        """Return facts about column clusters for the report; none without clusters."""
        return {}

    # The fused ops below return None if no backend has such an op.
    def try_linear_swiglu(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002  no fused op by default
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        return None

    def try_linear_add(
        self,
        x: torch.Tensor,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        residual: torch.Tensor,  # noqa: ARG002
        ops: Ops,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Add the product and bias to ``residual`` in place, or return None without such an op."""
        return None

    def try_swiglu_quant_linear(
        self,
        gate_up: torch.Tensor,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        ops: Ops,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Compute SwiGLU's gate, quantize and multiply, or return None without a fused op."""
        return None

    def try_qkv_rope_cache(
        self,
        x: Any,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        inputs: RopeCacheInputs,  # noqa: ARG002
        ops: Ops,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Compute the product, RoPE and the store into the KV cache, or return None."""
        return None


@dataclass(frozen=True)
class PackedAndUnpackedWeight(WeightFormat):
    """A weight together with the expanded form that its torch reference multiplies.

    The weight is expanded once instead of in each call.

    Attributes:
        packed: the weight as stored, used for everything but products.
        unpacked: the expanded weight, used for products.
    """

    packed: WeightFormat
    unpacked: WeightFormat

    @property
    def format(self) -> str:
        """Return the name of the weight format."""
        return self.packed.format

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.packed.shape

    @property
    def column_slice_alignment(self) -> int:
        """Return the multiple at which columns may be cut."""
        return self.packed.column_slice_alignment

    @property
    def input_quant_spec(self) -> ActQuantSpec | None:
        """Return how the input is quantized, or None for a float input."""
        return self.packed.input_quant_spec

    @property
    def upcast_spec(self) -> UpcastSpec | None:
        """Return None: it is expanded already."""
        return None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> WeightFormat:
        """Raise an error: an expanded form is never stored."""
        raise NotImplementedError(f"{sorted(tensors)}: an expanded weight is not stored")

    def matmul(self, x: Any, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.unpacked.matmul(x, bias, ops)

    def try_swiglu_quant_linear(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute SwiGLU's gate, quantize and multiply, or return None without a fused op."""
        return self.unpacked.try_swiglu_quant_linear(gate_up, bias, ops)

    def fake_quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rounded as the product uses it, in x's dtype."""
        return self.packed.fake_quantize_input(x)

    def input_row_outside_range_mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the rows far beyond the static range of the stored weight."""
        return self.packed.input_row_outside_range_mask(x)

    def extra_unpacked_tensors(self) -> list[torch.Tensor]:
        """Return the expanded numbers."""
        return [self.unpacked.tensors()["weight"]]

    def cluster_counts(self) -> dict[str, int]:
        """Return facts about column clusters for the report; none without clusters."""
        return self.packed.cluster_counts()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return self.packed.tensors()

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return self.packed.dequantize()

    def to(self, device: str) -> WeightFormat:
        """Return a copy on the device."""
        return self.packed.to(device)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> WeightFormat:
        """Return the given row ranges and one column range, for one rank."""
        return self.packed.slice(rows, columns)


def unpack_op_and_nbytes(
    weight_format: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[str, int] | None:
    """Return (op, bytes) of the expanded form of a weight of this format, or None if there is none.

    It is the counterpart of ``WeightFormat.upcast_spec`` for a weight that does not exist yet.
    """
    spec = _find_format_class(weight_format).UNPACKS
    return None if spec is None else (spec.op, shape[0] * shape[1] * (spec.dtype or dtype).itemsize)


def pad_columns_for_amx(weight: torch.Tensor) -> torch.Tensor:
    """Pad 16-bit rows with zeros, once instead of in each call of ``ops.linear``."""
    return (
        F.pad(weight, (0, -weight.shape[1] % AMX_K_ALIGNMENT))
        if weight.dtype.itemsize == 2
        else weight
    )


def pack_as_format(
    weight_format: str, weight: torch.Tensor, dtype: torch.dtype, **layout: Any
) -> WeightFormat:
    """Store a dense weight [N, K] as ``weight_format``.

    Args:
        weight_format: name of the format.
        weight: [N, K], floating point.
        dtype: dtype of the activations.
        **layout: options of the format.
    """
    return _find_format_class(weight_format).pack(weight, dtype, **layout)


def from_tensors(weight_format: str, tensors: Mapping[str, torch.Tensor]) -> WeightFormat:
    """Build a weight from its stored ``tensors()``.

    Raises:
        CorruptArtifact: if a tensor differs from the format's ``STORED_TENSORS`` (suffix →
            dimensions and dtypes).
        KeyError: with the suffix of a missing tensor.
    """
    format_class = _find_format_class(weight_format)
    layout = format_class.STORED_TENSORS
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


def packed_tensor_specs(
    weight_format: str, shape: tuple[int, int], dtype: torch.dtype, **layout: Any
) -> PackedTensorSpecs:
    """Return shapes and dtypes, by suffix, of the tensors that ``pack`` stores for this shape."""
    return _find_format_class(weight_format).packed_tensor_specs(shape, dtype, **layout)


def slice_tensor(
    tensor: torch.Tensor, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return row ranges of [N, …], concatenated, and one column range; a view where possible."""
    parts = [
        tensor[a:b] if columns is None else tensor[a:b, columns[0] : columns[1]] for a, b in rows
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _find_format_class(weight_format: str) -> type[WeightFormat]:
    """Return the class of ``weights/<weight_format>.py``, or of the recipe's file of that name."""
    for package in ("modelmill.weights", "modelmill.quant"):
        module = import_module_if_exists(package, weight_format)
        for cls in vars(module).values() if module is not None else ():
            if (
                isinstance(cls, type)
                and issubclass(cls, WeightFormat)
                and vars(cls).get("format") == weight_format
            ):
                return cls
    known = ", ".join(n for n in list_module_names("modelmill.weights") if n != "base")
    raise IncompatibleArtifact(
        f"the weight format {weight_format!r} is not supported (supported: {known}); "
        "rebuild the engine"
    )

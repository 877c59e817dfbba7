"""int8 weights for int8 inputs: a scale per row, per-token or static input scales.

A layer that would lose too much accuracy keeps float activations: the same weights are then
multiplied by ``int8_linear``. One stored number, ``input_scale``, selects among the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.quant_types import QUANT_MAX, ActQuantSpec, QuantizedInput, round_to_dtype
from modelmill.ops.registry import Ops
from modelmill.ops.rms_norm_quant import quantize_rows
from modelmill.ops.w8a8_linear import Linear8BitInputs
from modelmill.weights.base import (
    STATIC_RANGE_MARGIN_FACTOR,
    PackedTensorSpecs,
    StoredTensorDimsAndDtypes,
    UpcastSpec,
    WeightFormat,
    pad_columns_for_amx,
    slice_tensor,
)

PER_TOKEN_SCALE_MARKER, FLOAT_INPUT_MARKER = 0.0, -1.0  # special values of input_scale


@dataclass(frozen=True)
class W8A8Weight(WeightFormat):
    """A matrix in 8 bits for inputs in 8 bits.

    Attributes:
        weight: [N, K] int8.
        scale: [N] float32, all equal if quantized per tensor.
        input_scale: [1] float32, the static scale of the activations; 0: dynamic per-token scales;
            −1: float activations.
        inv_input_scale: [1] float32, the factor a fused norm applies before it rounds; None without
            a static scale.
        float_input: whether input_scale is −1.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor
    inv_input_scale: torch.Tensor | None = None
    float_input: bool = False
    format: str = "w8a8"

    VALUE_DTYPE: ClassVar[torch.dtype] = torch.int8
    PRODUCT: ClassVar[str] = "w8a8_linear"
    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes] = {
        "weight": (2, (torch.int8, torch.float8_e4m3fn)),
        "scale": (1, (torch.float32,)),
        "input_scale": (1, (torch.float32,)),
    }
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("w8a8_linear", torch.float32)
    UNPACKS_FLOAT_INPUT: ClassVar[UpcastSpec] = UpcastSpec("int8_linear", None)
    QUANTIZES_INPUT: ClassVar[bool] = True

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG003  the same for every dtype
        *,
        per_channel: bool = True,
        input_scale: float = PER_TOKEN_SCALE_MARKER,
    ) -> Self:
        """Round to nearest; the largest magnitude of a row or matrix maps to the largest value."""
        wide = weight.float()
        peak = wide.abs().amax(-1) if per_channel else wide.abs().amax().expand(len(wide))
        # a tensor, because GPUs divide by a scalar with its reciprocal and the last bit would
        # depend on the device
        scale = peak / torch.full_like(peak, QUANT_MAX[cls.VALUE_DTYPE])
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        values = round_to_dtype(wide / scale[:, None], cls.VALUE_DTYPE)
        return cls.from_values_and_scales(
            values, scale, torch.full((1,), input_scale, device=wide.device)
        )

    @classmethod
    def from_values_and_scales(
        cls, values: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor
    ) -> Self:
        """Build a weight from its stored tensors."""
        static_scale = float(input_scale)
        factor = (1.0 / input_scale.double()).float() if static_scale > 0 else None
        return cls(values, scale.contiguous(), input_scale, factor, static_scale < 0)

    @classmethod
    def packed_tensor_specs(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG003
        **layout: object,  # noqa: ARG003  no option changes a size
    ) -> PackedTensorSpecs:
        """Return shape and dtype of each stored tensor, by suffix."""
        scales = {"scale": ((shape[0],), torch.float32), "input_scale": ((1,), torch.float32)}
        return {"weight": (shape, cls.VALUE_DTYPE), **scales}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Build the weight from its stored tensors by suffix."""
        weight, scale, input_scale = tensors["weight"], tensors["scale"], tensors["input_scale"]
        dtypes = (weight.dtype, scale.dtype, input_scale.dtype) == (
            cls.VALUE_DTYPE,
            torch.float32,
            torch.float32,
        )
        if (
            not dtypes
            or weight.dim() != 2
            or scale.shape != weight.shape[:1]
            or input_scale.shape != (1,)
        ):
            raise CorruptArtifact(
                f"an 8-bit weight of shape {list(weight.shape)} is damaged; rebuild it"
            )
        return cls.from_values_and_scales(weight, scale, input_scale)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def input_quant_spec(self) -> ActQuantSpec | None:
        """Return the quant spec that a fused norm may produce."""
        return None if self.float_input else self._cached_input_quant_spec

    @cached_property
    def _cached_input_quant_spec(self) -> ActQuantSpec:
        return ActQuantSpec(self.VALUE_DTYPE, self.inv_input_scale)

    @property
    def upcast_spec(self) -> UpcastSpec:
        """Return the op that expands this weight in every call; it depends on the inputs."""
        return self.UNPACKS_FLOAT_INPUT if self.float_input else self.UNPACKS

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return {"weight": self.weight, "scale": self.scale, "input_scale": self.input_scale}

    def matmul(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        if isinstance(x, torch.Tensor):
            if self.float_input:
                return self.matmul_float_input(x, bias, ops)
            values, scale = self.run_bound_op(ops.quantize, x, self._cached_input_quant_spec)
            x = QuantizedInput(values, scale, x.dtype)
        return self.matmul_quantized(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def try_swiglu_quant_linear(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Multiply silu(first half) · second half of [T, 2·K], quantized in the same pass.

        Returns:
            The product, or None without a fused op.
        """
        if self.float_input or not ops.fuses_silu_mul_quant:
            return None
        values, scale = self.run_bound_op(
            ops.silu_mul_quant, gate_up, self.VALUE_DTYPE, self.inv_input_scale
        )
        x = QuantizedInput(values, scale, gate_up.dtype)
        return self.matmul_quantized(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def matmul_quantized(
        self, x: QuantizedInput, x_scale: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply activations in 8 bits."""
        inputs = Linear8BitInputs(x.values, self.weight, self.scale, x_scale, x.dtype, bias)
        return self.run_bound_op(getattr(ops, self.PRODUCT), inputs)

    def matmul_float_input(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply activations that are not quantized, by the dequantized weight."""
        return self.run_bound_op(ops.int8_linear, x, self.weight, self.scale, bias)

    def try_linear_swiglu(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        if isinstance(x, torch.Tensor) or ops.w8a8_linear_swiglu is None:
            return None
        x_scale = self.input_scale if x.scale is None else x.scale
        inputs = Linear8BitInputs(x.values, self.weight, self.scale, x_scale, x.dtype, bias)
        return self.run_bound_op(ops.w8a8_linear_swiglu, inputs)

    def fake_quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] as the product uses it: rounded to 8 bits and back, in x's dtype."""
        if self.float_input:
            return x
        factor = None if self.inv_input_scale is None else self.inv_input_scale.to(x.device)
        values, scale = quantize_rows(x, ActQuantSpec(self.VALUE_DTYPE, factor))
        by = self.input_scale.to(x.device) if scale is None else scale[..., None]
        return (values.to(torch.float32) * by).to(x.dtype)

    def input_row_outside_range_mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return [T] bool: rows that go far beyond the static scale; None without one."""
        if self.inv_input_scale is None:
            return None
        peak = x.float().abs().amax(-1) * self.inv_input_scale.to(x.device)
        return peak > STATIC_RANGE_MARGIN_FACTOR * QUANT_MAX[self.VALUE_DTYPE] + 0.5

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return self.weight.float() * self.scale[:, None]

    def unpack(self, dtype: torch.dtype) -> Self:
        """Return the weight with its values expanded for activations of dtype."""
        spec = self.upcast_spec
        wide = self.weight.to(spec.dtype or dtype)
        return replace(self, weight=pad_columns_for_amx(wide) if spec.dtype is None else wide)

    def to(self, device: str) -> Self:
        """Return a copy on the device."""
        factor = None if self.inv_input_scale is None else self.inv_input_scale.to(device)
        moved = self.weight.to(device), self.scale.to(device), self.input_scale.to(device)
        return replace(
            self, weight=moved[0], scale=moved[1], input_scale=moved[2], inv_input_scale=factor
        )

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Self:
        """Return the given row ranges and one column range, for one rank."""
        return replace(
            self,
            weight=slice_tensor(self.weight, rows, columns),
            scale=slice_tensor(self.scale, rows),
        )

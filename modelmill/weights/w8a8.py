"""int8 weights for int8 activations: one weight scale a row, activations scaled by token or by one
static number.

A layer whose accuracy asks for it keeps its activations as they are: the same weights are then
multiplied as those of ``int8_operations``. Which of the three it is stands in one stored number,
``input_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.quant_types import QUANT_MAX, ActQuantSpec, QuantizedInput, round_to_dtype
from modelmill.ops.registry import Ops
from modelmill.ops.rms_norm_quant import quantize_rows
from modelmill.weights.base import TensorLayout, UnpackSpec, pad_columns, slice_tensor

PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]
PER_TOKEN_SCALE, FLOAT_INPUT = 0.0, -1.0  # what input_scale holds where it is no scale


@dataclass(frozen=True)
class W8A8Weight:
    """weight: [N, K] int8; scale: [N] float32, all alike where one was asked for.

    input_scale: [1] float32, the static scale of the activations; 0: each token has its own; −1:
    they stay as they are. inv_input_scale: [1] float32, what a norm multiplies with before it
    rounds; None where nothing is static. float_input: input_scale is −1.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor
    inv_input_scale: torch.Tensor | None = None
    float_input: bool = False
    format: str = "w8a8"
    alignment: int = 1

    VALUE_DTYPE: ClassVar[torch.dtype] = torch.int8
    LAYOUT: ClassVar[TensorLayout] = {
        "weight": (2, (torch.int8, torch.float8_e4m3fn)),
        "scale": (1, (torch.float32,)),
        "input_scale": (1, (torch.float32,)),
    }
    UNPACKS: ClassVar[UnpackSpec] = UnpackSpec("w8a8_linear", torch.float32)
    UNPACKS_FLOAT_INPUT: ClassVar[UnpackSpec] = UnpackSpec("int8_linear", None)

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG003  the same for every dtype
        *,
        per_channel: bool = True,
        input_scale: float = PER_TOKEN_SCALE,
    ) -> Self:
        """Round to nearest: largest magnitude of a row, or of the matrix, on the largest value of
        the type.
        """
        wide = weight.float()
        peak = wide.abs().amax(-1) if per_channel else wide.abs().amax().expand(len(wide))
        # a tensor: by a bare number GPUs divide with its reciprocal, and the last bit would depend
        # on the machine
        scale = peak / torch.full_like(peak, QUANT_MAX[cls.VALUE_DTYPE])
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        values = round_to_dtype(wide / scale[:, None], cls.VALUE_DTYPE)
        return cls.from_stored(values, scale, torch.full((1,), input_scale, device=wide.device))

    @classmethod
    def from_stored(
        cls, values: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor
    ) -> Self:
        """From what is stored."""
        given = float(input_scale)
        factor = (1.0 / input_scale.double()).float() if given > 0 else None
        return cls(values, scale.contiguous(), input_scale, factor, given < 0)

    @classmethod
    def packed_info(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG003
        **layout: object,  # noqa: ARG003  it changes no size
    ) -> PackedInfo:
        scales = {"scale": ((shape[0],), torch.float32), "input_scale": ((1,), torch.float32)}
        return {"weight": (shape, cls.VALUE_DTYPE), **scales}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        weight, scale, given = tensors["weight"], tensors["scale"], tensors["input_scale"]
        dtypes = (weight.dtype, scale.dtype, given.dtype) == (
            cls.VALUE_DTYPE,
            torch.float32,
            torch.float32,
        )
        if (
            not dtypes
            or weight.dim() != 2
            or scale.shape != weight.shape[:1]
            or given.shape != (1,)
        ):
            raise CorruptArtifact(
                f"a weight of shape {list(weight.shape)} with scales in 8 bits is damaged; "
                "rebuild it"
            )
        return cls.from_stored(weight, scale, given)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def act_quant(self) -> ActQuantSpec | None:
        """What a norm in front may put out at once."""
        return None if self.float_input else ActQuantSpec(self.VALUE_DTYPE, self.inv_input_scale)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "scale": self.scale, "input_scale": self.input_scale}

    def matmul(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            if self.float_input:
                return self.matmul_float_input(x, bias, ops)
            x = QuantizedInput(*ops.quantize(x, self.VALUE_DTYPE, self.inv_input_scale), x.dtype)
        return self.matmul_quantized(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def try_swiglu_quant(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Of silu(first half) · second half of [T, 2·K], rounded to 8 bits in the same pass; None:
        not in one.
        """
        if self.float_input or not ops.fuses_silu_mul_quant:
            return None
        x = QuantizedInput(
            *ops.silu_mul_quant(gate_up, self.VALUE_DTYPE, self.inv_input_scale), gate_up.dtype
        )
        return self.matmul_quantized(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def matmul_quantized(
        self, x: QuantizedInput, x_scale: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """The product with activations in 8 bits."""
        return ops.w8a8_linear(x.values, self.weight, self.scale, x_scale, x.dtype, bias)

    def matmul_float_input(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """The product with activations as they are."""
        return ops.int8_linear(x, self.weight, self.scale, bias)

    def try_linear_swiglu(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        if isinstance(x, torch.Tensor) or ops.w8a8_linear_swiglu is None:
            return None
        x_scale = self.input_scale if x.scale is None else x.scale
        return ops.w8a8_linear_swiglu(x.values, self.weight, self.scale, x_scale, x.dtype, bias)

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] as it is multiplied: rounded to 8 bits and back, in x's dtype."""
        if self.float_input:
            return x
        factor = None if self.inv_input_scale is None else self.inv_input_scale.to(x.device)
        values, scale = quantize_rows(x, self.VALUE_DTYPE, factor, None, None, 8)
        by = self.input_scale.to(x.device) if scale is None else scale[..., None]
        return (values.to(torch.float32) * by).to(x.dtype)

    def dense(self) -> torch.Tensor:
        return self.weight.float() * self.scale[:, None]

    def unpack(self, dtype: torch.dtype) -> Self:
        how = self.UNPACKS_FLOAT_INPUT if self.float_input else self.UNPACKS
        wide = self.weight.to(how.dtype or dtype)
        return replace(self, weight=pad_columns(wide) if how.dtype is None else wide)

    def to(self, device: str) -> Self:
        factor = None if self.inv_input_scale is None else self.inv_input_scale.to(device)
        moved = self.weight.to(device), self.scale.to(device), self.input_scale.to(device)
        return replace(
            self, weight=moved[0], scale=moved[1], input_scale=moved[2], inv_input_scale=factor
        )

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Self:
        return replace(
            self,
            weight=slice_tensor(self.weight, rows, columns),
            scale=slice_tensor(self.scale, rows),
        )

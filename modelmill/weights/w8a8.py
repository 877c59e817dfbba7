"""int8 weights for int8 activations: one weight scale a row, activations scaled by token or by one static number.

A layer whose accuracy asks for it keeps its activations as they are: the same weights are then multiplied as those of
``int8``. Which of the three it is stands in one stored number, ``input_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.eight_bit import LARGEST, Quantized, Wanted, rounded
from modelmill.ops.rms_norm_quant import quantized
from modelmill.ops.shelf import Ops
from modelmill.weights.held import Expansion, Layout, cut, filled

Info = dict[str, tuple[tuple[int, ...], torch.dtype]]
BY_TOKEN, AS_THEY_ARE = 0.0, -1.0  # what input_scale holds where it is no scale


@dataclass(frozen=True)
class Held:
    """weight: [N, K] int8; scale: [N] float32, all alike where one was asked for.

    input_scale: [1] float32, the static scale of the activations; 0: each token has its own; −1: they stay as they are.
    factor: [1] float32, what a norm multiplies with before it rounds; None where nothing is static. floats: −1.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor
    factor: torch.Tensor | None = None
    floats: bool = False
    kind: str = "w8a8"
    grain: int = 1

    VALUES: ClassVar[torch.dtype] = torch.int8
    LAYOUT: ClassVar[Layout] = {
        "weight": (2, (torch.int8, torch.float8_e4m3fn)),
        "scale": (1, (torch.float32,)),
        "input_scale": (1, (torch.float32,)),
    }
    EXPANDS: ClassVar[Expansion] = Expansion("w8a8_linear", torch.float32)
    EXPANDS_FLOATS: ClassVar[Expansion] = Expansion("int8_linear", None)

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG003  the same for every dtype
        *,
        per_channel: bool = True,
        input_scale: float = BY_TOKEN,
    ) -> Self:
        """Round to nearest: largest magnitude of a row, or of the matrix, on the largest value of the type."""
        wide = weight.float()
        peak = wide.abs().amax(-1) if per_channel else wide.abs().amax().expand(len(wide))
        # a tensor: by a bare number GPUs divide with its reciprocal, and the last bit would depend on the machine
        scale = peak / torch.full_like(peak, LARGEST[cls.VALUES])
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        values = rounded(wide / scale[:, None], cls.VALUES)
        return cls.of(values, scale, torch.full((1,), input_scale, device=wide.device))

    @classmethod
    def of(cls, values: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor) -> Self:
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
    ) -> Info:
        scales = {"scale": ((shape[0],), torch.float32), "input_scale": ((1,), torch.float32)}
        return {"weight": (shape, cls.VALUES), **scales}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        weight, scale, given = tensors["weight"], tensors["scale"], tensors["input_scale"]
        kinds = (weight.dtype, scale.dtype, given.dtype) == (cls.VALUES, torch.float32, torch.float32)
        if not kinds or weight.dim() != 2 or scale.shape != weight.shape[:1] or given.shape != (1,):
            raise CorruptArtifact(
                f"a weight of shape {list(weight.shape)} with scales in 8 bits is damaged; rebuild it"
            )
        return cls.of(weight, scale, given)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def wants(self) -> Wanted | None:
        """What a norm in front may put out at once."""
        return None if self.floats else Wanted(self.VALUES, self.factor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "scale": self.scale, "input_scale": self.input_scale}

    def matmul(self, x: torch.Tensor | Quantized, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            if self.floats:
                return self.multiplied_floats(x, bias, ops)
            x = Quantized(*ops.quantize(x, self.VALUES, self.factor), x.dtype)
        return self.multiplied(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def matmul_gated(self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        """Of silu(first half) · second half of [T, 2·K], rounded to 8 bits in the same pass; None: not in one."""
        if self.floats or not ops.gates_quantize:
            return None
        x = Quantized(*ops.silu_mul_quant(gate_up, self.VALUES, self.factor), gate_up.dtype)
        return self.multiplied(x, self.input_scale if x.scale is None else x.scale, bias, ops)

    def multiplied(self, x: Quantized, x_scale: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """The product with activations in 8 bits."""
        return ops.w8a8_linear(x.values, self.weight, self.scale, x_scale, x.dtype, bias)

    def multiplied_floats(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """The product with activations as they are."""
        return ops.int8_linear(x, self.weight, self.scale, bias)

    def gated(self, x: torch.Tensor | Quantized, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        if isinstance(x, torch.Tensor) or ops.gated8_linear is None:
            return None
        x_scale = self.input_scale if x.scale is None else x.scale
        return ops.gated8_linear(x.values, self.weight, self.scale, x_scale, x.dtype, bias)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] as it is multiplied: rounded to 8 bits and back, in x's dtype."""
        if self.floats:
            return x
        factor = None if self.factor is None else self.factor.to(x.device)
        values, scale = quantized(x, self.VALUES, factor, None, None, 8)
        by = self.input_scale.to(x.device) if scale is None else scale[..., None]
        return (values.to(torch.float32) * by).to(x.dtype)

    def dense(self) -> torch.Tensor:
        return self.weight.float() * self.scale[:, None]

    def expanded(self, dtype: torch.dtype) -> Self:
        how = self.EXPANDS_FLOATS if self.floats else self.EXPANDS
        wide = self.weight.to(how.dtype or dtype)
        return replace(self, weight=filled(wide) if how.dtype is None else wide)

    def to(self, device: str) -> Self:
        factor = None if self.factor is None else self.factor.to(device)
        moved = self.weight.to(device), self.scale.to(device), self.input_scale.to(device)
        return replace(self, weight=moved[0], scale=moved[1], input_scale=moved[2], factor=factor)

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Self:
        return replace(self, weight=cut(self.weight, rows, columns), scale=cut(self.scale, rows))

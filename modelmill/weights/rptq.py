"""RPTQ weights: integer weights and inputs, with the input channels in clusters.

Weights are int8 or 4-bit, inputs 8- or 4-bit. Columns are in clustered order and in groups of one
width; a cluster that does not fill its groups leaves empty columns (perm −1). A channel may have
several columns of one group, with the same weights: each represents a part of the channel's range,
and the first also the zero-point, so that together they have several times as many levels. Modes:
"exact": a static scale and zero-point per group, which the kernel applies group by group; "folded":
the input scales are folded into the weight, which has one scale per row, an ordinary int8 product;
"dynamic": a scale per token and group, computed at run time. A static weight may have a fallback: a
token whose integers would leave the range in a group gets a longer step there, instead of being
clipped. ops/rptq_linear.py and ops/rptq_quant.py describe the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.int4_linear import pack_codes, unpack_codes
from modelmill.ops.quant_types import ActQuantSpec, QuantizedInput
from modelmill.ops.registry import Ops
from modelmill.ops.rptq_linear import RptqLinearInputs
from modelmill.ops.rptq_quant import RptqQuantInputs, rptq_quant
from modelmill.weights._rptq_columns import (
    gather_clustered_columns,
    repeated_channel_column_mask,
    restore_channel_columns,
    round_scale_to_fp16,
    rptq_group_width_and_count,
)
from modelmill.weights.base import (
    STATIC_RANGE_MARGIN_FACTOR,
    PackedTensorSpecs,
    StoredTensorDimsAndDtypes,
    UpcastSpec,
    WeightFormat,
    slice_tensor,
)

_VALID_STORED_FALLBACK_FLAGS: tuple[list[int], ...] = (
    [],
    [0],
    [1],
)  # what may follow the three sizes of a stored weight
STATIC_INPUT_QUANT_SUFFIXES = (
    "inv_input_scales",
    "input_zero_points",
    "input_scales",
    "zero_point_bias",
)


@dataclass(frozen=True)
class RptqWeight(WeightFormat):
    """A matrix in clustered column order, with the quantization of its input.

    Attributes:
        weight: [N, P] int8 or [N, P/2] uint8 (packed as for int4_linear).
        scale: [N, G] float16 (folded: float32).
        offset: [N, G] float16, or None for 8 bits.
        perm: [P] int32, the channel of each column or −1.
        columns: K.
        inv_input_scales: [P] float32; static modes only, as the next three.
        input_zero_points: [P] int32.
        input_scales: [G] float32.
        zero_point_bias: [N] float32.
        bits: of the inputs.
        fallback: whether a token that leaves a group's static range gets a longer step there.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    perm: torch.Tensor
    inv_input_scales: torch.Tensor | None
    input_zero_points: torch.Tensor | None
    input_scales: torch.Tensor | None
    zero_point_bias: torch.Tensor | None
    columns: int
    group_size: int
    bits: int
    fallback: bool = False
    format: str = "rptq"

    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes] = {
        "weight": (2, (torch.int8, torch.uint8)),
        **dict.fromkeys(("scale", "offset"), (2, (torch.float16, torch.float32))),
        **dict.fromkeys(("perm", "input_zero_points", "sizes"), (1, (torch.int32,))),
        **dict.fromkeys(
            ("inv_input_scales", "input_scales", "zero_point_bias"), (1, (torch.float32,))
        ),
    }
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("rptq_linear", torch.float32)
    QUANTIZES_INPUT: ClassVar[bool] = True

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG003
        *,
        mode: str = "dynamic",
        weight_bits: int = 8,
        bits: int = 8,
        splits_per_channel: int = 1,  # noqa: ARG003
    ) -> RptqWeight:
        """Round to nearest without statistics: channels in natural order, dynamic input scales."""
        wide = weight.float()
        group, groups = rptq_group_width_and_count(wide.shape[1], "dynamic")
        if mode == "folded":
            group, groups = rptq_group_width_and_count(wide.shape[1], mode)
        perm = torch.full((group * groups,), -1, dtype=torch.int32, device=wide.device)
        perm[: wide.shape[1]] = torch.arange(wide.shape[1], device=wide.device)
        parts = gather_clustered_columns(wide, perm).view(len(wide), groups, group)
        if weight_bits == 8:
            scale = round_scale_to_fp16(parts.abs().amax(-1) / 127)
            codes, offset = (parts / scale[..., None]).round().clamp(-127, 127), None
        else:
            low, high = parts.amin(-1), parts.amax(-1)
            scale, offset = round_scale_to_fp16((high - low) / 15), low.half().float()
            codes = ((parts - offset[..., None]) / scale[..., None]).round().clamp(0, 15)
        return RptqWeight.from_codes(
            codes.flatten(1), scale, offset, perm, wide.shape[1], group, bits
        )

    @staticmethod
    def from_codes(
        codes: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        perm: torch.Tensor,
        columns: int,
        group_size: int,
        bits: int,
    ) -> RptqWeight:
        """Build a weight for inputs with dynamic scales.

        codes: [N, P], −127…127 (8 bits) or 0…15 together with an offset (4 bits).
        """
        packed = codes.to(torch.int8).contiguous() if offset is None else pack_codes(codes)
        small = torch.float16 if codes.shape[1] > group_size else torch.float32
        offset = None if offset is None else offset.to(small)
        return RptqWeight(
            packed,
            scale.to(small),
            offset,
            perm.int(),
            None,
            None,
            None,
            None,
            columns,
            group_size,
            bits,
        )

    def with_static_input_scales(
        self,
        inv_input_scales: torch.Tensor,
        input_zero_points: torch.Tensor,
        input_scales: torch.Tensor,
        *,
        fallback: bool = False,
    ) -> RptqWeight:
        """Return the weight with calibrated input scales and zero-points: [P], [P] and [G]."""
        return replace(
            self,
            inv_input_scales=inv_input_scales.float(),
            input_zero_points=input_zero_points.int(),
            input_scales=input_scales.float(),
            zero_point_bias=self._compute_zero_point_bias(input_zero_points, input_scales),
            fallback=fallback,
        )

    def _compute_zero_point_bias(
        self, input_zero_points: torch.Tensor, input_scales: torch.Tensor
    ) -> torch.Tensor:
        """Return the contribution of the zero-points to each output, [N]."""
        zero_points = self._column_zero_points(input_zero_points).double()
        by = (zero_points.view(-1, self.group_size) * input_scales.double()[:, None]).flatten()
        return -(self._dequantize_clustered() @ by).float()

    def _column_zero_points(self, input_zero_points: torch.Tensor) -> torch.Tensor:
        """Return [P], the number subtracted from each column's integers.

        It is the zero-point in a channel's first column and the smallest integer in its other
        columns.
        """
        min_code = -(2 ** (self.bits - 1))
        return torch.where(
            self.perm < 0,
            0,
            torch.where(repeated_channel_column_mask(self.perm), min_code, input_zero_points),
        )

    def _dequantize_clustered(self) -> torch.Tensor:
        """Return scale · code + offset of every column, [N, P] float64."""
        codes = self.codes().double()
        wide = [
            None if t is None else t.double().repeat_interleave(self.group_size, 1)
            for t in (self.scale, self.offset)
        ]
        assert wide[0] is not None, "there are scales"
        return codes * wide[0] if wide[1] is None else codes * wide[0] + wide[1]

    @classmethod
    def packed_tensor_specs(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG003
        *,
        mode: str = "dynamic",
        weight_bits: int = 8,
        bits: int = 8,  # noqa: ARG003
        splits_per_channel: int = 1,
    ) -> PackedTensorSpecs:
        """Return shape and dtype of each stored tensor, by suffix."""
        rows, columns = shape
        group, groups = rptq_group_width_and_count(columns, mode, splits_per_channel)
        width = group * groups
        small = torch.float16 if groups > 1 else torch.float32
        info: PackedTensorSpecs = {
            "weight": ((rows, width), torch.int8),
            "scale": ((rows, groups), small),
        }
        if weight_bits == 4:
            info["weight"] = ((rows, width // 2), torch.uint8)
            info["offset"] = ((rows, groups), small)
        info["perm"] = ((width,), torch.int32)
        if mode != "dynamic":
            info |= {
                "inv_input_scales": ((width,), torch.float32),
                "input_zero_points": ((width,), torch.int32),
            }
            info |= {
                "input_scales": ((groups,), torch.float32),
                "zero_point_bias": ((rows,), torch.float32),
            }
        return info | {"sizes": ((4,), torch.int32)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> RptqWeight:
        """Build the weight from its stored tensors by suffix."""
        sizes = [int(n) for n in tensors["sizes"].tolist()]
        # three: a weight of an earlier modelmill, without fallback
        if (
            tensors["sizes"].dim() != 1
            or len(sizes) not in (3, 4)
            or sizes[3:] not in _VALID_STORED_FALLBACK_FLAGS
        ):
            raise CorruptArtifact("an rptq weight has no valid sizes; rebuild the engine")
        columns, group, bits = sizes[:3]
        weight, scale, perm = (tensors[name] for name in ("weight", "scale", "perm"))
        offset = tensors.get("offset")
        inv_scales, zero_points, scales, bias = (
            tensors.get(name) for name in STATIC_INPUT_QUANT_SUFFIXES
        )
        static = (inv_scales, zero_points, scales, bias)
        fallback = sizes[3:] == [1]
        out = RptqWeight(weight, scale, offset, perm, *static, columns, group, bits, fallback)
        rows, width = out.weight.shape[0], out.perm.numel()
        expected = RptqWeight.packed_tensor_specs(
            (rows, columns), torch.float32, weight_bits=4 if out.offset is not None else 8
        )
        fits = (
            columns > 0 and group > 0 and group % 32 == 0 and width % group == 0 and bits in (4, 8)
        )
        fits = fits and out.weight.shape[1] == (width if out.offset is None else width // 2)
        fits = (
            fits
            and out.weight.dtype is expected["weight"][1]
            and out.scale.shape == (rows, width // group)
        )
        if not fits or not out._is_consistent():
            raise CorruptArtifact(
                f"an rptq weight of {columns} columns in groups of {group} is damaged; "
                "rebuild the engine"
            )
        return out

    def _is_consistent(self) -> bool:
        """Return whether the shapes match the codes and every perm entry is a valid channel."""
        rows, width = self.weight.shape[0], self.perm.numel()
        static = (
            self.inv_input_scales,
            self.input_zero_points,
            self.input_scales,
            self.zero_point_bias,
        )
        sizes = (width, width, width // self.group_size, rows)
        fits = all(t is None for t in static) or all(
            t is not None and len(t) == n for t, n in zip(static, sizes, strict=True)
        )
        small = torch.float16 if width > self.group_size else torch.float32
        grids = [t for t in (self.scale, self.offset) if t is not None]
        fits = fits and all(t.shape == self.scale.shape and t.dtype is small for t in grids)
        return (
            fits
            and width > 0
            and int(self.perm.min()) >= -1
            and int(self.perm.max()) < self.columns
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.weight.shape[0], self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        tensors_by_suffix = {
            "weight": self.weight,
            "scale": self.scale,
            "offset": self.offset,
            "perm": self.perm,
            "inv_input_scales": self.inv_input_scales,
            "input_zero_points": self.input_zero_points,
            "input_scales": self.input_scales,
            "zero_point_bias": self.zero_point_bias,
        }
        stored = {name: t for name, t in tensors_by_suffix.items() if t is not None}
        return stored | {
            "sizes": torch.tensor(
                [self.columns, self.group_size, self.bits, self.fallback], dtype=torch.int32
            )
        }

    @property
    def input_quant_spec(self) -> ActQuantSpec | None:
        """Return the quant spec that a fused norm may produce: integers in clustered order.

        It is None if steps depend on the token: dynamic scales, and static ones with fallback.
        """
        return (
            None
            if self.inv_input_scales is None or self.fallback
            else ActQuantSpec(
                torch.int8, self.inv_input_scales, self.input_zero_points, self.perm, self.bits
            )
        )

    def matmul(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        if isinstance(x, QuantizedInput):
            return self.matmul_quantized(x.values, None, bias, x.dtype, ops)
        q, step = self.run_bound_op(ops.rptq_quant, self._quant_inputs(x))
        return self.matmul_quantized(q, step, bias, x.dtype, ops)

    def try_swiglu_quant_linear(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply silu(first half) · second half of [T, 2·K], quantized in the same pass."""
        q, step = self.run_bound_op(ops.rptq_quant, self._quant_inputs(gate_up, gated=True))
        return self.matmul_quantized(q, step, bias, gate_up.dtype, ops)

    def _quant_inputs(self, x: torch.Tensor, *, gated: bool = False) -> RptqQuantInputs:
        scales, zero_points = self.inv_input_scales, self.input_zero_points
        static_step = self.input_scales if self.fallback else None
        sizes = (self.bits, self.group_size, gated)
        return RptqQuantInputs(x, self.perm, scales, zero_points, *sizes, static_step)

    def matmul_quantized(
        self,
        q: torch.Tensor,
        input_scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        ops: Ops,
    ) -> torch.Tensor:
        """Multiply integers [T, P] in clustered order.

        input_scales: [T, G], scales of the tokens; None for the static ones.
        """
        steps = self.input_scales if input_scales is None else input_scales
        assert steps is not None, "static or dynamic scales"
        grids = (self.weight, self.scale, self.offset, self.group_size)
        inputs = RptqLinearInputs(q, *grids, steps, self.zero_point_bias, bias, dtype)
        return self.run_bound_op(ops.rptq_linear, inputs)

    def codes(self) -> torch.Tensor:
        """Return the codes [N, P] int8 or uint8."""
        return self.weight if self.offset is None else unpack_codes(self.weight, self.perm.numel())

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        wide = self._dequantize_clustered()
        if self.input_scales is not None and self.inv_input_scales is not None:
            # 1 where the kernel applies the input scales; in the folded mode they are in the weight
            wide = wide * (
                self.input_scales.double().repeat_interleave(self.group_size)
                * self.inv_input_scales.double()
            )
        return restore_channel_columns(wide, self.perm, self.columns).float()

    def fake_quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input [T, K] that ``dequantize()`` is multiplied by, in x's dtype.

        It is x rounded to integers and back.
        """
        if self.inv_input_scales is None:
            return self._fake_quantize_input_dynamic(x)
        assert self.input_zero_points is not None and self.input_scales is not None, "static"  # noqa: PT018
        q, step = rptq_quant(self._quant_inputs(x))
        wide = q.double()
        if step is not None:
            lengthened = step.double() / self.input_scales
            wide = wide * lengthened.repeat_interleave(self.group_size, 1)
        wide = wide - self._column_zero_points(self.input_zero_points)
        real = self.perm >= 0
        at = self.perm[real].long()
        counts = wide.new_zeros(*wide.shape[:-1], self.columns).index_add_(-1, at, wide[..., real])
        factor = wide.new_ones(self.columns)
        factor[at] = self.inv_input_scales[real].double()
        return (counts / factor).to(x.dtype)

    def input_row_outside_range_mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return [T] bool: rows far beyond a channel's static range; None if dynamic.

        Of a channel's several columns the first ends the range below and the last one above.
        """
        if self.inv_input_scales is None or self.input_zero_points is None:
            return None
        clustered = x.float()[:, self.perm.clamp(min=0).long()] * self.inv_input_scales
        scaled = clustered + self.input_zero_points
        real = self.perm >= 0
        first, last = (
            real & ~repeated_channel_column_mask(self.perm),
            real & ~repeated_channel_column_mask(self.perm.flip(0)).flip(0),
        )
        end = STATIC_RANGE_MARGIN_FACTOR * 2 ** (self.bits - 1)
        outside = ((scaled < -end - 0.5) & first) | ((scaled > end - 0.5) & last)
        return outside.any(-1)

    def _fake_quantize_input_dynamic(self, x: torch.Tensor) -> torch.Tensor:
        q, step = rptq_quant(RptqQuantInputs(x, self.perm, None, None, self.bits, self.group_size))
        assert step is not None, "dynamic scales"
        wide = q.double() * step.double().repeat_interleave(self.group_size, 1)
        return restore_channel_columns(wide, self.perm, self.columns).to(x.dtype)

    def unpack(self, dtype: torch.dtype) -> RptqWeight:  # noqa: ARG002
        """Return the weight with its values expanded for activations of dtype."""
        groups = self.codes().view(len(self.weight), -1, self.group_size)
        return replace(self, weight=groups.permute(1, 2, 0).float().contiguous())

    def to(self, device: str) -> RptqWeight:
        """Return a copy on the device."""
        moved = {name: t.to(device) for name, t in self.tensors().items() if name != "sizes"}
        return RptqWeight.from_tensors(moved | {"sizes": self.tensors()["sizes"]})

    def cluster_counts(self) -> dict[str, int]:
        """Count, for the report, clusters, single-channel clusters and empty columns."""
        sizes = (self.perm.view(-1, self.group_size) >= 0).sum(1)
        empty = int((self.perm < 0).sum())
        return {
            "clusters": int((sizes > 0).sum()),
            "single_channel": int((sizes == 1).sum()),
            "empty": empty,
        }

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> RptqWeight:
        """Return the given row ranges and one column range, for one rank."""
        first, last = columns
        grids = (
            None if t is None else slice_tensor(t, rows)
            for t in (self.weight, self.scale, self.offset)
        )
        weight, scale, offset = grids
        assert weight is not None and scale is not None, "there are codes and scales"  # noqa: PT018
        in_range = (self.perm >= first) & (self.perm < last)
        perm = torch.where(in_range, self.perm - first, -1)
        part = replace(
            self, weight=weight, scale=scale, offset=offset, perm=perm, columns=last - first
        )
        if (
            part.inv_input_scales is None
            or part.input_zero_points is None
            or part.input_scales is None
        ):
            return part._drop_empty_groups()
        bias = part._compute_zero_point_bias(part.input_zero_points, part.input_scales)
        return replace(part, zero_point_bias=bias)._drop_empty_groups()

    def _drop_empty_groups(self) -> RptqWeight:
        """Return the weight without its empty groups."""
        nonempty = (self.perm.view(-1, self.group_size) >= 0).any(1)
        if bool(nonempty.all()) or self.scale.shape[1] == 1:
            return self
        each = nonempty.repeat_interleave(self.group_size)
        stored = each if self.offset is None else nonempty.repeat_interleave(self.group_size // 2)

        def select(t: torch.Tensor | None, where: torch.Tensor) -> torch.Tensor | None:
            return None if t is None else t[..., where].contiguous()

        return replace(
            self,
            weight=self.weight[:, stored].contiguous(),
            scale=self.scale[:, nonempty].contiguous(),
            offset=select(self.offset, nonempty),
            perm=self.perm[each],
            inv_input_scales=select(self.inv_input_scales, each),
            input_zero_points=select(self.input_zero_points, each),
            input_scales=select(self.input_scales, nonempty),
        )

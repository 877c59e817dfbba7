"""Weights and inputs in integers, the inputs' channels in clusters (RPTQ): int8 or 4-bit weights,
8- or 4-bit inputs.

Columns stand in clustered order and in groups of one width; a cluster that does not fill its groups
leaves columns that no channel goes to (perm −1). A channel may have several columns of one group,
with the same weights: each holds one stretch of its range, and the first the zero-point, so that
they add up to a number of more levels. Modes: "exact": a static step and zero-point a group, which
the kernel applies group by group; "folded": the steps are in the weight, which has one scale a row,
an ordinary int8 product; "dynamic": a step a token and group, found when the input comes.
ops/rptq_linear.py and ops/rptq_quant.py tell the arithmetic.
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
from modelmill.ops.rms_norm_quant import quantize_rows
from modelmill.ops.rptq_quant import rptq_quant
from modelmill.weights._rptq_columns import (
    permute_columns,
    repeated_columns,
    round_scale_to_fp16,
    rptq_group_layout,
    unpermute_columns,
)
from modelmill.weights.base import TensorLayout, UnpackSpec, slice_tensor

MODES = ("exact", "folded", "dynamic")
STATIC_SUFFIXES = ("inv_input_scales", "input_zero_points", "input_scales", "zero_point_bias")
PackedInfo = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class RptqWeight:
    """weight: [N, P] int8 or [N, P/2] uint8 (packed as int4_linear's). scale, offset: [N, G]
    float16 (folded: float32).

    perm: [P] int32, the channel of each column or −1. inv_input_scales, input_zero_points: [P]
    float32, int32; input_scales: [G] float32; zero_point_bias: [N] float32; all four of static
    modes. columns: K. bits: of the inputs."""

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
    format: str = "rptq"
    alignment: int = 1

    LAYOUT: ClassVar[TensorLayout] = {
        "weight": (2, (torch.int8, torch.uint8)),
        **dict.fromkeys(("scale", "offset"), (2, (torch.float16, torch.float32))),
        **dict.fromkeys(("perm", "input_zero_points", "sizes"), (1, (torch.int32,))),
        **dict.fromkeys(
            ("inv_input_scales", "input_scales", "zero_point_bias"), (1, (torch.float32,))
        ),
    }
    UNPACKS: ClassVar[UnpackSpec] = UnpackSpec("rptq_linear", torch.float32)

    @staticmethod
    def pack(
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG004
        *,
        mode: str = "dynamic",
        weight_bits: int = 8,
        bits: int = 8,
        splits_per_channel: int = 1,  # noqa: ARG004
    ) -> RptqWeight:
        """Round to nearest without statistics: channels in their own order, inputs scaled as they
        come.
        """
        wide = weight.float()
        group, groups = rptq_group_layout(wide.shape[1], "dynamic")
        if mode == "folded":
            group, groups = rptq_group_layout(wide.shape[1], mode)
        perm = torch.full((group * groups,), -1, dtype=torch.int32, device=wide.device)
        perm[: wide.shape[1]] = torch.arange(wide.shape[1], device=wide.device)
        parts = permute_columns(wide, perm).view(len(wide), groups, group)
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
        """codes: [N, P], −127…127 (8 bit) or 0…15 beside an offset (4 bit); for inputs that are
        scaled as they come.
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

    def with_static_scales(
        self,
        inv_input_scales: torch.Tensor,
        input_zero_points: torch.Tensor,
        input_scales: torch.Tensor,
    ) -> RptqWeight:
        """The same for inputs with steps and zero-points of calibration: [P], [P] and [G]."""
        return replace(
            self,
            inv_input_scales=inv_input_scales.float(),
            input_zero_points=input_zero_points.int(),
            input_scales=input_scales.float(),
            zero_point_bias=self._compute_zero_point_bias(input_zero_points, input_scales),
        )

    def _compute_zero_point_bias(
        self, input_zero_points: torch.Tensor, input_scales: torch.Tensor
    ) -> torch.Tensor:
        """What the zero-points come to in each output, [N]."""
        zero_points = self._column_zero_points(input_zero_points).double()
        by = (zero_points.view(-1, self.group_size) * input_scales.double()[:, None]).flatten()
        return -(self._dequantize_columns() @ by).float()

    def _column_zero_points(self, input_zero_points: torch.Tensor) -> torch.Tensor:
        """[P], what is subtracted from each column's integers: a channel's zero-point once, then
        the least integers.
        """
        min_code = -(2 ** (self.bits - 1))
        return torch.where(
            self.perm < 0, 0, torch.where(repeated_columns(self.perm), min_code, input_zero_points)
        )

    def _dequantize_columns(self) -> torch.Tensor:
        """scale · code + offset of every column, [N, P] float64."""
        codes = self.codes().double()
        wide = [
            None if t is None else t.double().repeat_interleave(self.group_size, 1)
            for t in (self.scale, self.offset)
        ]
        assert wide[0] is not None, "there are scales"
        return codes * wide[0] if wide[1] is None else codes * wide[0] + wide[1]

    @staticmethod
    def packed_info(
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG004
        *,
        mode: str = "dynamic",
        weight_bits: int = 8,
        bits: int = 8,  # noqa: ARG004
        splits_per_channel: int = 1,
    ) -> PackedInfo:
        rows, columns = shape
        group, groups = rptq_group_layout(columns, mode, splits_per_channel)
        width = group * groups
        small = torch.float16 if groups > 1 else torch.float32
        info: PackedInfo = {"weight": ((rows, width), torch.int8), "scale": ((rows, groups), small)}
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
        return info | {"sizes": ((3,), torch.int32)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> RptqWeight:
        if tensors["sizes"].shape != (3,):
            raise CorruptArtifact("an rptq weight has lost its sizes; rebuild the engine")
        columns, group, bits = (int(n) for n in tensors["sizes"].tolist())
        weight, scale, perm = (tensors[name] for name in ("weight", "scale", "perm"))
        offset = tensors.get("offset")
        inv_scales, zero_points, scales, bias = (tensors.get(name) for name in STATIC_SUFFIXES)
        static = (inv_scales, zero_points, scales, bias)
        out = RptqWeight(weight, scale, offset, perm, *static, columns, group, bits)
        rows, width = out.weight.shape[0], out.perm.numel()
        expected = RptqWeight.packed_info(
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
                f"an rptq weight of {columns} columns in groups of {group} is damaged; rebuild it"
            )
        return out

    def _is_consistent(self) -> bool:
        """Whether what stands beside the codes fits them: as many as there are, of channels that
        there are.
        """
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
        return self.weight.shape[0], self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("weight", "scale", "offset", "perm", *STATIC_SUFFIXES)
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | {
            "sizes": torch.tensor([self.columns, self.group_size, self.bits], dtype=torch.int32)
        }

    @property
    def act_quant(self) -> ActQuantSpec | None:
        """What a norm in front may put out at once: integers in clustered order; None where steps
        are each token's.
        """
        return (
            None
            if self.inv_input_scales is None
            else ActQuantSpec(
                torch.int8, self.inv_input_scales, self.input_zero_points, self.perm, self.bits
            )
        )

    def matmul(
        self, x: torch.Tensor | QuantizedInput, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        if isinstance(x, QuantizedInput):
            return self.matmul_quantized(x.values, None, bias, x.dtype, ops)
        q, step = ops.rptq_quant(
            x, self.perm, self.inv_input_scales, self.input_zero_points, self.bits, self.group_size
        )
        return self.matmul_quantized(q, step, bias, x.dtype, ops)

    def try_swiglu_quant(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Of silu(first half) · second half of [T, 2·K], rounded to integers in the same pass."""
        q, step = ops.rptq_quant(
            gate_up,
            self.perm,
            self.inv_input_scales,
            self.input_zero_points,
            self.bits,
            self.group_size,
            True,
        )
        return self.matmul_quantized(q, step, bias, gate_up.dtype, ops)

    def matmul_quantized(
        self,
        q: torch.Tensor,
        input_scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        ops: Ops,
    ) -> torch.Tensor:
        """Of integers [T, P] in clustered order; input_scales: theirs where they have their own,
        [T, G].
        """
        input_scales = self.input_scales if input_scales is None else input_scales
        grids = (self.weight, self.scale, self.offset, self.group_size)
        return ops.rptq_linear(q, *grids, input_scales, self.zero_point_bias, bias, dtype)

    def try_linear_swiglu(
        self,
        x: torch.Tensor | QuantizedInput,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        ops: Ops,  # noqa: ARG002
    ) -> None:
        return None

    def codes(self) -> torch.Tensor:
        """[N, P] int8 or uint8."""
        return self.weight if self.offset is None else unpack_codes(self.weight, self.perm.numel())

    def dense(self) -> torch.Tensor:
        wide = self._dequantize_columns()
        if self.input_scales is not None and self.inv_input_scales is not None:
            # 1 where the kernel applies the steps; in the folded mode the inputs' steps are in the
            # weight
            wide = wide * (
                self.input_scales.double().repeat_interleave(self.group_size)
                * self.inv_input_scales.double()
            )
        return unpermute_columns(wide, self.perm, self.columns).float()

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        """The input [T, K] that is really multiplied with ``dense()``: rounded to integers and
        back, x's dtype.
        """
        if self.inv_input_scales is None:
            return self._fake_quantize_dynamic(x)
        assert self.input_zero_points is not None, "a static mode"
        q = quantize_rows(
            x, torch.int8, self.inv_input_scales, self.input_zero_points, self.perm, self.bits
        )[0]
        wide = q.double() - self._column_zero_points(self.input_zero_points)
        real = self.perm >= 0
        at = self.perm[real].long()
        counts = wide.new_zeros(*wide.shape[:-1], self.columns).index_add_(-1, at, wide[..., real])
        factor = wide.new_ones(self.columns)
        factor[at] = self.inv_input_scales[real].double()
        return (counts / factor).to(x.dtype)

    def _fake_quantize_dynamic(self, x: torch.Tensor) -> torch.Tensor:
        q, step = rptq_quant(x, self.perm, None, None, self.bits, self.group_size)
        assert step is not None, "steps of their own"
        wide = q.double() * step.double().repeat_interleave(self.group_size, 1)
        return unpermute_columns(wide, self.perm, self.columns).to(x.dtype)

    def unpack(self, dtype: torch.dtype) -> RptqWeight:  # noqa: ARG002
        groups = self.codes().view(len(self.weight), -1, self.group_size)
        return replace(self, weight=groups.permute(1, 2, 0).float().contiguous())

    def to(self, device: str) -> RptqWeight:
        moved = {name: t.to(device) for name, t in self.tensors().items() if name != "sizes"}
        return RptqWeight.from_tensors(moved | {"sizes": self.tensors()["sizes"]})

    def cluster_stats(self) -> dict[str, int]:
        """For the report: clusters, those of a single channel, and columns that no channel goes
        to.
        """
        sizes = (self.perm.view(-1, self.group_size) >= 0).sum(1)
        empty = int((self.perm < 0).sum())
        return {
            "clusters": int((sizes > 0).sum()),
            "single_channel": int((sizes == 1).sum()),
            "empty": empty,
        }

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> RptqWeight:
        first, last = columns
        grids = (
            None if t is None else slice_tensor(t, rows)
            for t in (self.weight, self.scale, self.offset)
        )
        weight, scale, offset = grids
        assert weight is not None and scale is not None, "there are codes and scales"  # noqa: PT018
        mine = (self.perm >= first) & (self.perm < last)
        perm = torch.where(mine, self.perm - first, -1)
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
        """Without the groups that no channel goes to."""
        full = (self.perm.view(-1, self.group_size) >= 0).any(1)
        if bool(full.all()) or self.scale.shape[1] == 1:
            return self
        each = full.repeat_interleave(self.group_size)
        stored = each if self.offset is None else full.repeat_interleave(self.group_size // 2)

        def kept(t: torch.Tensor | None, where: torch.Tensor) -> torch.Tensor | None:
            return None if t is None else t[..., where].contiguous()

        return replace(
            self,
            weight=self.weight[:, stored].contiguous(),
            scale=self.scale[:, full].contiguous(),
            offset=kept(self.offset, full),
            perm=self.perm[each],
            inv_input_scales=kept(self.inv_input_scales, each),
            input_zero_points=kept(self.input_zero_points, each),
            input_scales=kept(self.input_scales, full),
        )

"""Weights and inputs in integers, the inputs' channels in clusters (RPTQ): int8 or 4-bit weights, 8- or 4-bit inputs.

Columns stand in clustered order and in groups of one width; a cluster that does not fill its groups leaves columns that
no channel goes to (order −1). A channel may have several columns of one group, with the same weights: each holds one
stretch of its range, and the first the zero-point, so that they add up to a number of more levels. Modes: "exact": a
static step and zero-point a group, which the kernel applies group by group; "folded": the steps are in the weight,
which has one scale a row, an ordinary int8 product; "dynamic": a step a token and group, found when the input comes.
ops/clustered_linear.py and ops/cluster_quant.py tell the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.cluster_quant import cluster_quant
from modelmill.ops.eight_bit import Quantized, Wanted
from modelmill.ops.int4_linear import codes_of, pack_codes
from modelmill.ops.rms_norm_quant import quantized
from modelmill.ops.shelf import Ops
from modelmill.weights._clusters import gathered, groups_of, repeated, settled, spread
from modelmill.weights.held import Expansion, Layout, cut

MODES = ("exact", "folded", "dynamic")
Info = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Held:
    """weight: [N, P] int8 or [N, P/2] uint8 (packed as int4_linear's). scale, offset: [N, G] float16 (folded: float32).

    order: [P] int32, the channel of each column or −1. factor, zero: [P] float32, int32 (1 / step; static modes). step:
    [G] float32, constant: [N] float32 (static modes). columns: K. bits: of the inputs.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    order: torch.Tensor
    factor: torch.Tensor | None
    zero: torch.Tensor | None
    step: torch.Tensor | None
    constant: torch.Tensor | None
    columns: int
    group: int
    bits: int
    kind: str = "clustered"
    grain: int = 1

    LAYOUT: ClassVar[Layout] = {
        "weight": (2, (torch.int8, torch.uint8)),
        **dict.fromkeys(("scale", "offset"), (2, (torch.float16, torch.float32))),
        **dict.fromkeys(("order", "zero", "sizes"), (1, (torch.int32,))),
        **dict.fromkeys(("factor", "step", "constant"), (1, (torch.float32,))),
    }
    EXPANDS: ClassVar[Expansion] = Expansion("clustered_linear", torch.float32)

    @staticmethod
    def pack(
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG004  the same for every dtype
        *,
        mode: str = "dynamic",
        weight_bits: int = 8,
        bits: int = 8,
        copies: int = 1,  # noqa: ARG004  inputs scaled as they come need none
    ) -> Held:
        """Round to nearest without statistics: channels in their own order, inputs scaled as they come."""
        wide = weight.float()
        group, groups = groups_of(wide.shape[1], "dynamic")
        if mode == "folded":
            group, groups = groups_of(wide.shape[1], mode)
        order = torch.full((group * groups,), -1, dtype=torch.int32, device=wide.device)
        order[: wide.shape[1]] = torch.arange(wide.shape[1], device=wide.device)
        parts = spread(wide, order).view(len(wide), groups, group)
        if weight_bits == 8:
            scale = settled(parts.abs().amax(-1) / 127)
            codes, offset = (parts / scale[..., None]).round().clamp(-127, 127), None
        else:
            low, high = parts.amin(-1), parts.amax(-1)
            scale, offset = settled((high - low) / 15), low.half().float()
            codes = ((parts - offset[..., None]) / scale[..., None]).round().clamp(0, 15)
        return Held.from_codes(codes.flatten(1), scale, offset, order, wide.shape[1], group, bits)

    @staticmethod
    def from_codes(
        codes: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        order: torch.Tensor,
        columns: int,
        group: int,
        bits: int,
    ) -> Held:
        """codes: [N, P], −127…127 (8 bit) or 0…15 beside an offset (4 bit); for inputs that are scaled as they come."""
        kept = codes.to(torch.int8).contiguous() if offset is None else pack_codes(codes)
        small = torch.float16 if codes.shape[1] > group else torch.float32
        offset = None if offset is None else offset.to(small)
        return Held(kept, scale.to(small), offset, order.int(), None, None, None, None, columns, group, bits)

    def static(self, factor: torch.Tensor, zero: torch.Tensor, step: torch.Tensor) -> Held:
        """The same for inputs with steps and zero-points of calibration: factor, zero [P], step [G]."""
        constant = self._constant(zero, step)
        return replace(self, factor=factor.float(), zero=zero.int(), step=step.float(), constant=constant)

    def _constant(self, zero: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """What the zero-points come to in each output, [N]."""
        seen = self._origin(zero).double()
        by = (seen.view(-1, self.group) * step.double()[:, None]).flatten()
        return -(self._values() @ by).float()

    def _origin(self, zero: torch.Tensor) -> torch.Tensor:
        """[P], what is subtracted from each column's integers: a channel's zero-point once, then the least integers."""
        least = -(2 ** (self.bits - 1))
        return torch.where(self.order < 0, 0, torch.where(repeated(self.order), least, zero))

    def _values(self) -> torch.Tensor:
        """scale · code + offset of every column, [N, P] float64."""
        codes = self.codes().double()
        wide = [None if t is None else t.double().repeat_interleave(self.group, 1) for t in (self.scale, self.offset)]
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
        copies: int = 1,
    ) -> Info:
        rows, columns = shape
        group, groups = groups_of(columns, mode, copies)
        width = group * groups
        small = torch.float16 if groups > 1 else torch.float32
        info: Info = {"weight": ((rows, width), torch.int8), "scale": ((rows, groups), small)}
        if weight_bits == 4:
            info["weight"] = ((rows, width // 2), torch.uint8)
            info["offset"] = ((rows, groups), small)
        info["order"] = ((width,), torch.int32)
        if mode != "dynamic":
            info |= {"factor": ((width,), torch.float32), "zero": ((width,), torch.int32)}
            info |= {"step": ((groups,), torch.float32), "constant": ((rows,), torch.float32)}
        return info | {"sizes": ((3,), torch.int32)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        if tensors["sizes"].shape != (3,):
            raise CorruptArtifact("a clustered weight has lost its sizes; rebuild the engine")
        columns, group, bits = (int(n) for n in tensors["sizes"].tolist())
        weight, scale, order = (tensors[name] for name in ("weight", "scale", "order"))
        offset, factor, zero, step, constant = (
            tensors.get(name) for name in ("offset", "factor", "zero", "step", "constant")
        )
        static = (factor, zero, step, constant)
        held = Held(weight, scale, offset, order, *static, columns, group, bits)
        rows, width = held.weight.shape[0], held.order.numel()
        wanted = Held.packed_info((rows, columns), torch.float32, weight_bits=4 if held.offset is not None else 8)
        fits = columns > 0 and group > 0 and group % 32 == 0 and width % group == 0 and bits in (4, 8)
        fits = fits and held.weight.shape[1] == (width if held.offset is None else width // 2)
        fits = fits and held.weight.dtype is wanted["weight"][1] and held.scale.shape == (rows, width // group)
        if not fits or not held._whole():
            raise CorruptArtifact(
                f"a clustered weight of {columns} columns in groups of {group} is damaged; rebuild it"
            )
        return held

    def _whole(self) -> bool:
        """Whether what stands beside the codes fits them: as many as there are, of channels that there are."""
        rows, width = self.weight.shape[0], self.order.numel()
        static = (self.factor, self.zero, self.step, self.constant)
        sizes = (width, width, width // self.group, rows)
        fits = all(t is None for t in static) or all(
            t is not None and len(t) == n for t, n in zip(static, sizes, strict=True)
        )
        small = torch.float16 if width > self.group else torch.float32
        grids = [t for t in (self.scale, self.offset) if t is not None]
        fits = fits and all(t.shape == self.scale.shape and t.dtype is small for t in grids)
        return fits and width > 0 and int(self.order.min()) >= -1 and int(self.order.max()) < self.columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.columns

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("weight", "scale", "offset", "order", "factor", "zero", "step", "constant")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | {"sizes": torch.tensor([self.columns, self.group, self.bits], dtype=torch.int32)}

    @property
    def wants(self) -> Wanted | None:
        """What a norm in front may put out at once: integers in clustered order; None where steps are each token's."""
        return None if self.factor is None else Wanted(torch.int8, self.factor, self.zero, self.order, self.bits)

    def matmul(self, x: torch.Tensor | Quantized, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        if isinstance(x, Quantized):
            return self.product(x.values, None, bias, x.dtype, ops)
        q, step = ops.cluster_quant(x, self.order, self.factor, self.zero, self.bits, self.group)
        return self.product(q, step, bias, x.dtype, ops)

    def matmul_gated(self, gate_up: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Of silu(first half) · second half of [T, 2·K], rounded to integers in the same pass."""
        q, step = ops.cluster_quant(gate_up, self.order, self.factor, self.zero, self.bits, self.group, True)
        return self.product(q, step, bias, gate_up.dtype, ops)

    def product(
        self, q: torch.Tensor, step: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, ops: Ops
    ) -> torch.Tensor:
        """Of integers [T, P] in clustered order; step: theirs where they have their own, [T, G]."""
        step = self.step if step is None else step
        grids = (self.weight, self.scale, self.offset, self.group)
        return ops.clustered_linear(q, *grids, step, self.constant, bias, dtype)

    def gated(self, x: torch.Tensor | Quantized, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:  # noqa: ARG002
        return None

    def codes(self) -> torch.Tensor:
        """[N, P] int8 or uint8."""
        return self.weight if self.offset is None else codes_of(self.weight, self.order.numel())

    def dense(self) -> torch.Tensor:
        wide = self._values()
        if self.step is not None and self.factor is not None:
            # 1 where the kernel applies the steps; in the folded mode the inputs' steps are in the weight
            wide = wide * (self.step.double().repeat_interleave(self.group) * self.factor.double())
        return gathered(wide, self.order, self.columns).float()

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """The input [T, K] that is really multiplied with ``dense()``: rounded to integers and back, x's dtype."""
        if self.factor is None:
            return self._seen_as_it_comes(x)
        assert self.zero is not None, "a static mode"
        q = quantized(x, torch.int8, self.factor, self.zero, self.order, self.bits)[0]
        wide = q.double() - self._origin(self.zero)
        real = self.order >= 0
        at = self.order[real].long()
        counts = wide.new_zeros(*wide.shape[:-1], self.columns).index_add_(-1, at, wide[..., real])
        factor = wide.new_ones(self.columns)
        factor[at] = self.factor[real].double()
        return (counts / factor).to(x.dtype)

    def _seen_as_it_comes(self, x: torch.Tensor) -> torch.Tensor:
        q, step = cluster_quant(x, self.order, None, None, self.bits, self.group)
        assert step is not None, "steps of their own"
        wide = q.double() * step.double().repeat_interleave(self.group, 1)
        return gathered(wide, self.order, self.columns).to(x.dtype)

    def expanded(self, dtype: torch.dtype) -> Held:  # noqa: ARG002  products are taken in float32
        groups = self.codes().view(len(self.weight), -1, self.group)
        return replace(self, weight=groups.permute(1, 2, 0).float().contiguous())

    def to(self, device: str) -> Held:
        moved = {name: t.to(device) for name, t in self.tensors().items() if name != "sizes"}
        return Held.from_tensors(moved | {"sizes": self.tensors()["sizes"]})

    def told(self) -> dict[str, int]:
        """For the report: clusters, those of a single channel, and columns that no channel goes to."""
        sizes = (self.order.view(-1, self.group) >= 0).sum(1)
        empty = int((self.order < 0).sum())
        return {"clusters": int((sizes > 0).sum()), "alone": int((sizes == 1).sum()), "empty": empty}

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        first, last = columns
        grids = (None if t is None else cut(t, rows) for t in (self.weight, self.scale, self.offset))
        weight, scale, offset = grids
        assert weight is not None and scale is not None, "there are codes and scales"  # noqa: PT018
        mine = (self.order >= first) & (self.order < last)
        order = torch.where(mine, self.order - first, -1)
        held = replace(self, weight=weight, scale=scale, offset=offset, order=order, columns=last - first)
        if held.factor is None or held.zero is None or held.step is None:
            return held._narrowed()
        return replace(held, constant=held._constant(held.zero, held.step))._narrowed()

    def _narrowed(self) -> Held:
        """Without the groups that no channel goes to."""
        full = (self.order.view(-1, self.group) >= 0).any(1)
        if bool(full.all()) or self.scale.shape[1] == 1:
            return self
        each = full.repeat_interleave(self.group)
        stored = each if self.offset is None else full.repeat_interleave(self.group // 2)

        def kept(t: torch.Tensor | None, where: torch.Tensor) -> torch.Tensor | None:
            return None if t is None else t[..., where].contiguous()

        return replace(
            self,
            weight=self.weight[:, stored].contiguous(),
            scale=self.scale[:, full].contiguous(),
            offset=kept(self.offset, full),
            order=self.order[each],
            factor=kept(self.factor, each),
            zero=kept(self.zero, each),
            step=kept(self.step, full),
        )

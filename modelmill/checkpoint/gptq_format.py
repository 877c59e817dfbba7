"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4 and 8 bits, with and without act-order, formats gptq and gptq_v2.

qweight [K·bits/32, N] int32, packed along K; qzeros [G, N·bits/32], along N, holding zero − 1 (gptq_v2: zero);
scales [G, N]; g_idx [K], the group of each column. weight = scale · (code − zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container
from modelmill.checkpoint.packed import RUN, Form, Packed, digest_of, nibbles, numbers_of, order_of, scales, words
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quote import quoted

FORMATS = ("gptq", "gptq_v2")
BITS = (4, 8)


def make(settings: Mapping[str, Any], where: Path) -> Gptq:
    """The scheme of a ``quantization_config``. Raises CheckpointError for settings that cannot be read."""
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    form = str(settings.get("checkpoint_format", "gptq"))
    if form not in FORMATS:
        raise CheckpointError(
            f"{where} is a GPTQ checkpoint of format {form!r}, known are {', '.join(FORMATS)}; "
            "take it in one of these, or the original and build with -q int4"
        )
    if type(bits) is not int or bits not in BITS:
        raise CheckpointError(
            f"{where} is a GPTQ checkpoint of {quoted(bits, 60)} bits, 4 and 8 can be read; {_instead(bits)}"
        )
    if not isinstance(group, int) or (group != -1 and (group < RUN or group % RUN)):
        raise CheckpointError(
            f"{where} is a GPTQ checkpoint in groups of {quoted(group, 60)}; groups of −1 or a multiple of {RUN} "
            "can be kept; take the original and build with -q int4 --group-size 32"
        )
    return Gptq(where, bits, group, bool(settings.get("sym", True)), 1 if form == "gptq" else 0)


def _instead(bits: Any) -> str:
    return (
        f"take the original checkpoint and build with -q int4{' (there is nothing smaller)' if bits in (2, 3) else ''}"
    )


@dataclass(frozen=True)
class Gptq:
    """bits: of a code. group: columns, −1 for whole rows. added: what stored zeros lack."""

    where: Path
    bits: int
    group: int
    symmetric: bool
    added: int
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    main: str = "qweight"

    @property
    def label(self) -> str:
        return f"GPTQ, {self.bits} bits{_in_groups(self.group)}"

    def form(self, raw: Container, stem: str) -> Form:
        here = words(raw.info(f"{stem}.qweight"), self.where)
        grids, zeros = scales(raw.info(f"{stem}.scales"), self.where), words(raw.info(f"{stem}.qzeros"), self.where)
        if grids[1] != here[1]:
            raise CorruptCheckpoint(f"{self.where}: {stem}.qweight {list(here)} and scales {list(grids)} do not fit")
        if (zeros[0], zeros[1] * 32 // self.bits) != grids:
            raise CorruptCheckpoint(f"{self.where}: {stem}.qzeros {list(zeros)} and scales {list(grids)} do not fit")
        columns = here[0] * 32 // self.bits
        group = -(-columns // RUN) * RUN if self.group == -1 else self.group
        if -(-columns // group) != grids[0]:
            raise CheckpointError(
                f"{self.where}: {stem} has {grids[0]} groups for {columns} columns, not groups of {group} at "
                f"{self.bits} bits as the config says; modules of other settings cannot be read, take the original"
            )
        grid = torch.float16 if self.symmetric and raw.info(f"{stem}.scales").dtype == "float16" else torch.float32
        order = digest_of(self._order(raw, stem, columns, group))
        return Form(self.label, self.bits, here[1], columns, group, not self.symmetric, grid, order)

    def packed(self, raw: Container, stem: str, form: Form) -> Packed:
        codes = nibbles(raw.get(f"{stem}.qweight").t().contiguous(), self.bits)  # [N, K]
        zeros = nibbles(raw.get(f"{stem}.qzeros"), self.bits).t().to(torch.int32) + self.added  # [N, G]
        scale = raw.get(f"{stem}.scales").t().contiguous()
        middle = 1 << (self.bits - 1)
        if self.symmetric and bool((zeros != middle).any()):
            raise CorruptCheckpoint(
                f'{self.where}: {stem} has zeros other than {middle}, its config says "sym": true; set it to false'
            )
        order = self._order(raw, stem, form.columns, form.group)
        if order is not None:
            codes = codes[:, order]
        offset = None
        if form.offset:  # scale · (shift − zero), exact in float32: 11 bits by 9
            offset = scale.float() * ((0 if self.bits == 4 else middle) - zeros)
        if self.bits == 8:
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
        return Packed(codes.contiguous(), scale.to(form.grid), offset, order)

    def _order(self, raw: Container, stem: str, columns: int, group: int) -> torch.Tensor | None:
        name = f"{stem}.g_idx"
        if name not in _names(raw):
            return None
        groups = numbers_of(raw, name, columns, self.where)
        try:
            return order_of(groups, group)
        except ValueError:
            raise CheckpointError(
                f"{self.where}: {name} has groups of uneven size, which cannot be kept; take the original checkpoint"
            ) from None


def _names(raw: Container) -> set[str]:
    return set(raw.names())


def _in_groups(group: int) -> str:
    return " a channel" if group == -1 else f" in groups of {group}"

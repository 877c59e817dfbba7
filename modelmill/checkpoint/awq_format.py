"""AutoAWQ checkpoints of version gemm: 4 bits with zeros.

qweight [K, N/8] int32: nibble i (the lowest first) holds output 8j + (0 2 4 6 1 3 5 7)[i]; qzeros [G, N/8] the same;
scales [G, N]. weight = scale · (code − zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container
from modelmill.checkpoint.packed import RUN, Form, Packed, nibbles, scales, words
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quote import quoted

PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, that each nibble holds."""


def make(settings: Mapping[str, Any], where: Path) -> Awq:
    """The scheme of a ``quantization_config``. Raises CheckpointError for settings that cannot be read."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    group = settings.get("group_size", settings.get("q_group_size", 128))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(
            f"{where} is an AWQ checkpoint of version {version!r}, gemm can be read; "
            "take it in that version, or the original and build with -q int4 --method awq"
        )
    if type(bits) is not int or bits != 4:
        raise CheckpointError(
            f"{where} is an AWQ checkpoint of {quoted(bits, 60)} bits, 4 can be read; "
            "take the original and build with -q int4"
        )
    if not isinstance(group, int) or (group != -1 and (group < RUN or group % RUN)):
        raise CheckpointError(
            f"{where} is an AWQ checkpoint in groups of {quoted(group, 60)}; groups of −1 or a multiple of {RUN} "
            "can be kept; take the original and build with -q int4 --group-size 32"
        )
    return Awq(where, group)


@dataclass(frozen=True)
class Awq:
    """group: columns, −1 for whole rows."""

    where: Path
    group: int
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")
    main: str = "qweight"

    @property
    def label(self) -> str:
        return "AWQ, 4 bits" + (" a channel" if self.group == -1 else f" in groups of {self.group}")

    def form(self, raw: Container, stem: str) -> Form:
        here, zeros = (words(raw.info(f"{stem}.{part}"), self.where) for part in ("qweight", "qzeros"))
        grids = scales(raw.info(f"{stem}.scales"), self.where)
        if grids[1] != here[1] * 8:
            raise CorruptCheckpoint(f"{self.where}: {stem}.qweight {list(here)} and scales {list(grids)} do not fit")
        if grids != (zeros[0], zeros[1] * 8):
            raise CorruptCheckpoint(f"{self.where}: {stem}.qzeros {list(zeros)} and scales {list(grids)} do not fit")
        columns = here[0]
        group = -(-columns // RUN) * RUN if self.group == -1 else self.group
        if -(-columns // group) != grids[0]:
            raise CorruptCheckpoint(f"{self.where}: {stem} has {grids[0]} groups for {columns} columns of {group}")
        return Form(self.label, 4, grids[1], columns, group, offset=True, grid=torch.float32)

    def packed(self, raw: Container, stem: str, form: Form) -> Packed:  # noqa: ARG002
        codes = _outputs(raw.get(f"{stem}.qweight")).t().contiguous()
        zeros = _outputs(raw.get(f"{stem}.qzeros")).t().to(torch.int32)
        scale = raw.get(f"{stem}.scales").t().contiguous().float()
        return Packed(codes, scale, scale * -zeros)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] → uint8 [R, N], outputs in order."""
    fields = nibbles(words, 4).view(words.shape[0], -1, 8)
    out = torch.empty_like(fields)
    out[:, :, list(PLACES)] = fields
    return out.flatten(1)

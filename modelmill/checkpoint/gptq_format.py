"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4 and 8 bits, with and without act-order.

The formats gptq and gptq_v2: qweight [K·bits/32, N] int32, packed along K; qzeros [G, N·bits/32],
along N, holding zero − 1 (gptq_v2: zero); scales [G, N]; g_idx [K], the group of each column.
weight = scale · (code − zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container
from modelmill.checkpoint.quant_layout import (
    QuantizedMatrix,
    QuantLayout,
    checked_packed_matrix_shape,
    group_size_text,
    parse_group_size,
    perm_digest,
    perm_from_group_index,
    read_group_index,
    unpack_fields,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote
from modelmill.weights.int4 import resolve_group_size

SUPPORTED_FORMATS = ("gptq", "gptq_v2")
SUPPORTED_BITS = (4, 8)


def parse_scheme(settings: Mapping[str, Any], path: Path) -> GptqScheme:
    """Parse a ``quantization_config``.

    Raises:
        CheckpointError: for unsupported settings.
    """
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    form = str(settings.get("checkpoint_format", "gptq"))
    if form not in SUPPORTED_FORMATS:
        raise CheckpointError(
            f"{path} is a GPTQ checkpoint of format {form!r}, known are "
            f"{', '.join(SUPPORTED_FORMATS)}; take it in one of these, or the original and build "
            "with -q int4"
        )
    if type(bits) is not int or bits not in SUPPORTED_BITS:
        raise CheckpointError(
            f"{path} is a GPTQ checkpoint of {quote(bits, 60)} bits, 4 and 8 can be read; "
            f"{_unsupported_bits_advice(bits)}"
        )
    group = parse_group_size(group, f"{path} is a GPTQ checkpoint")
    return GptqScheme(
        path, bits, group, bool(settings.get("sym", True)), 1 if form == "gptq" else 0
    )


def _unsupported_bits_advice(bits: Any) -> str:
    return (
        "take the original checkpoint and build with -q "
        f"int4{' (there is nothing smaller)' if bits in (2, 3) else ''}"
    )


@dataclass(frozen=True)
class GptqScheme:
    """GPTQ with one checkpoint's settings.

    Attributes:
        bits: of a code.
        group_size: columns per group, −1 for whole rows.
        zero_point_offset: added to the stored zeros.
    """

    path: Path
    bits: int
    group_size: int
    symmetric: bool
    zero_point_offset: int
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    marker_suffix: str = "qweight"

    @property
    def label(self) -> str:
        """Return the format's name and bits, for messages."""
        return f"GPTQ, {self.bits} bits{group_size_text(self.group_size)}"

    def quant_layout(self, raw: Container, stem: str) -> QuantLayout:
        """Return the quantization layout of the matrix called stem."""
        rows, columns, groups = checked_packed_matrix_shape(
            raw, stem, self.path, self.bits, packed_along_rows=False
        )
        group = resolve_group_size(self.group_size, columns)
        if -(-columns // group) != groups:
            raise CheckpointError(
                f"{self.path}: {stem} has {groups} groups for {columns} columns, not groups of "
                f"{group} at "
                f"{self.bits} bits as the config says; modules of other settings cannot be read, "
                "take the original"
            )
        grid = (
            torch.float16
            if self.symmetric and raw.tensor_info(f"{stem}.scales").dtype == "float16"
            else torch.float32
        )
        order = perm_digest(self._read_column_perm(raw, stem, columns, group))
        return QuantLayout(
            self.label, self.bits, rows, columns, group, not self.symmetric, grid, order
        )

    def read_quantized_matrix(
        self, raw: Container, stem: str, layout: QuantLayout
    ) -> QuantizedMatrix:
        """Read the matrix's integers, scales and offsets as stored."""
        codes = unpack_fields(raw.get(f"{stem}.qweight").t().contiguous(), self.bits)  # [N, K]
        zeros = (
            unpack_fields(raw.get(f"{stem}.qzeros"), self.bits).t().to(torch.int32)
            + self.zero_point_offset
        )  # [N, G]
        scale = raw.get(f"{stem}.scales").t().contiguous()
        middle = 1 << (self.bits - 1)
        if self.symmetric and bool((zeros != middle).any()):
            raise CorruptCheckpoint(
                f'{self.path}: {stem} has zeros other than {middle}, its config says "sym": true; '
                "set it to false"
            )
        order = self._read_column_perm(raw, stem, layout.columns, layout.group_size)
        if order is not None:
            codes = codes[:, order]
        offset = None
        if layout.has_offset:  # scale · (shift − zero), exact in float32: 11 bits by 9
            offset = scale.float() * ((0 if self.bits == 4 else middle) - zeros)
        if self.bits == 8:
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
        return QuantizedMatrix(codes.contiguous(), scale.to(layout.scale_dtype), offset, order)

    def _read_column_perm(
        self, raw: Container, stem: str, num_columns: int, group_size: int
    ) -> torch.Tensor | None:
        name = f"{stem}.g_idx"
        if name not in _all_tensor_names(raw):
            return None
        groups = read_group_index(raw, name, num_columns, self.path)
        try:
            return perm_from_group_index(groups, group_size)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: {name} has groups of uneven size, which cannot be kept; take the "
                "original checkpoint"
            ) from None


def _all_tensor_names(raw: Container) -> set[str]:
    return set(raw.names())

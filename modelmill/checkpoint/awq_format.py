"""AutoAWQ checkpoints of version gemm: 4 bits with zeros.

qweight [K, N/8] int32: nibble i (the lowest first) holds output 8j + (0 2 4 6 1 3 5 7)[i]; qzeros
[G, N/8] the same; scales [G, N]. weight = scale · (code − zero).
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
    unpack_fields,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote
from modelmill.weights.int4 import resolve_group_size

AWQ_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, that each nibble contains."""


def parse_scheme(settings: Mapping[str, Any], path: Path) -> AwqScheme:
    """Parse a ``quantization_config``.

    Raises:
        CheckpointError: for unsupported settings.
    """
    bits = settings.get("bits", settings.get("w_bit", 4))
    group = settings.get("group_size", settings.get("q_group_size", 128))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(
            f"{path} is an AWQ checkpoint of version {version!r}, gemm can be read; "
            "take it in that version, or the original and build with -q int4 --method awq"
        )
    if type(bits) is not int or bits != 4:
        raise CheckpointError(
            f"{path} is an AWQ checkpoint of {quote(bits, 60)} bits, 4 can be read; "
            "take the original and build with -q int4"
        )
    group = parse_group_size(group, f"{path} is an AWQ checkpoint")
    return AwqScheme(path, group)


@dataclass(frozen=True)
class AwqScheme:
    """AutoAWQ gemm with one checkpoint's settings.

    group_size: columns per group, −1 for whole rows.
    """

    path: Path
    group_size: int
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    marker_suffix: str = "qweight"

    @property
    def label(self) -> str:
        """Return the format's name and bits, for messages."""
        return f"AWQ, 4 bits{group_size_text(self.group_size)}"

    def quant_layout(self, raw: Container, stem: str) -> QuantLayout:
        """Return the quantization layout of the matrix called stem."""
        shape = checked_packed_matrix_shape(raw, stem, self.path, 4, packed_along_rows=True)
        group = resolve_group_size(self.group_size, shape.columns)
        if -(-shape.columns // group) != shape.groups:
            raise CorruptCheckpoint(
                f"{self.path}: {stem} has {shape.groups} groups for {shape.columns} columns of "
                f"{group}"
            )
        return QuantLayout(
            self.label,
            4,
            shape.rows,
            shape.columns,
            group,
            has_offset=True,
            scale_dtype=torch.float32,
        )

    def read_quantized_matrix(
        self,
        raw: Container,
        stem: str,
        layout: QuantLayout,  # noqa: ARG002
    ) -> QuantizedMatrix:
        """Read the matrix's integers, scales and offsets as stored."""
        codes = _unpack_in_output_order(raw.get(f"{stem}.qweight")).t().contiguous()
        zeros = _unpack_in_output_order(raw.get(f"{stem}.qzeros")).t().to(torch.int32)
        scale = raw.get(f"{stem}.scales").t().contiguous().float()
        return QuantizedMatrix(codes, scale, scale * -zeros)


def _unpack_in_output_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [R, N/8] to uint8 [R, N], outputs in order."""
    fields = unpack_fields(words, 4).view(words.shape[0], -1, 8)
    out = torch.empty_like(fields)
    out[:, :, list(AWQ_NIBBLE_ORDER)] = fields
    return out.flatten(1)

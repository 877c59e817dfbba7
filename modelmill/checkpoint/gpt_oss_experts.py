"""gpt-oss's experts one by one: its files have those of a layer stacked, gate and up interleaved.

Stored for each layer are ``gate_up_proj`` [E, H, 2·I] and ``down_proj`` [E, I, H], transposed, or
in MXFP4 ``…_blocks`` [E, rows, columns/32, 16] and ``…_scales`` [E, rows, columns/32], where byte j
of a block has column 2j in its low half and column 2j + 1 in its high half; and biases [E, rows].
Gate and up are every other row. Presented are ``experts.3.gate_proj.weight`` and the like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, ConvertedContainer, TensorInfo
from modelmill.checkpoint.prequantized import UNSUPPORTED_ADVICE
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout
from modelmill.core.errors import CheckpointError, CorruptCheckpoint

MODEL_TYPE = "gpt_oss"
BLOCK_COLUMNS = 32
# matrix of the file → the matrices in its rows
MATRICES_OF_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED_TENSOR_RE = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias|)")


def check_mxfp4_method(settings: Any, path: Path) -> None:
    """Raise CheckpointError for a ``quantization_config`` of another method than MXFP4."""
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method != "mxfp4":
        raise CheckpointError(
            f"{path}: gpt-oss quantized by {str(method)[:40]!r} is not supported (known is mxfp4); "
            f"{UNSUPPORTED_ADVICE}"
        )


def expert_layouts_from_config(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo]
) -> dict[str, QuantLayout]:
    """Return the layouts of the experts' matrices that a config says to be in MXFP4."""
    settings = config.get("quantization_config")
    if config.get("model_type") != MODEL_TYPE or not settings:
        return {}
    return {
        name: _mxfp4_layout(*info.shape)
        for name, info in infos.items()
        if ".experts." in name and name.endswith(".weight")
    }


def _mxfp4_layout(rows: int, columns: int) -> QuantLayout:
    return QuantLayout(
        label="MXFP4",
        bits=4,
        rows=rows,
        columns=columns,
        group_size=BLOCK_COLUMNS,
        has_offset=False,
        scale_dtype=torch.uint8,
    )


@dataclass(frozen=True)
class _ExpertSlice:
    """One expert's matrix or bias in a stack.

    Attributes:
        stem: the stack, without its suffix.
        expert: its number.
        first, step: its rows.
        suffix: "_blocks", "_bias" or "".
    """

    stem: str
    expert: int
    first: int
    step: int
    suffix: str


class GptOssExpertContainer(ConvertedContainer):
    """A container of gpt-oss with each expert's matrices by themselves."""

    def __init__(self, raw: Container) -> None:
        super().__init__(raw)
        self._parts: dict[str, _ExpertSlice] = {}
        self._names = []
        for name in raw.names():
            match = _STACKED_TENSOR_RE.fullmatch(name)
            if match is None:
                self._names.append(name)
            elif match[3] != "_scales":
                self._add_expert_tensors(name, match[1], match[2], match[3])

    def _add_expert_tensors(self, name: str, prefix: str, matrix: str, suffix: str) -> None:
        shape = self._raw.tensor_info(name).shape
        dims = {"_blocks": 4, "_bias": 2, "": 3}[suffix]
        if len(shape) != dims:
            raise CorruptCheckpoint(f"{name} has {list(shape)}, not {dims} dimensions")
        parts = MATRICES_OF_STACKED[matrix]
        leaf = "bias" if suffix == "_bias" else "weight"
        for expert in range(shape[0]):
            for first, part in enumerate(parts):
                own = f"{prefix}.{expert}.{part}.{leaf}"
                self._parts[own] = _ExpertSlice(
                    f"{prefix}.{matrix}", expert, first, len(parts), suffix
                )
                self._names.append(own)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        part = self._parts.get(name)
        if part is None:
            return self._raw.tensor_info(name)
        layout = self.quant_layout(name)
        if layout is not None:
            nbytes = layout.rows * layout.columns * 17 // 32
            return TensorInfo(name, (layout.rows, layout.columns), layout.label, nbytes)
        info = self._raw.tensor_info(part.stem + part.suffix)
        rows = info.shape[-1] // part.step
        shape = (rows,) if part.suffix else (rows, info.shape[1])
        size = getattr(torch, info.dtype).itemsize
        return TensorInfo(name, shape, info.dtype, torch.Size(shape).numel() * size)

    def get(self, name: str) -> torch.Tensor:
        """Return the values, of MXFP4 in float32."""
        part = self._parts.get(name)
        if part is None:
            return self._raw.get(name)
        if part.suffix == "_blocks":
            return self.read_quantized_matrix(name).dequantize(BLOCK_COLUMNS)
        rows = self._raw.get(part.stem + part.suffix)[part.expert]
        return (rows if part.suffix else rows.T)[part.first :: part.step].contiguous()

    def quant_layout(self, name: str) -> QuantLayout | None:
        """Return how a matrix is stored in MXFP4; None if it is not."""
        part = self._parts.get(name)
        if part is None or part.suffix != "_blocks":
            return None
        stored = self._raw.tensor_info(f"{part.stem}_blocks")
        scales = self._raw.tensor_info(f"{part.stem}_scales")
        if stored.dtype != "uint8" or scales.dtype != "uint8" or stored.shape[3] != 16:
            raise CorruptCheckpoint(f"{part.stem}_blocks are not MXFP4 blocks of 16 bytes")
        if scales.shape != stored.shape[:3] or stored.shape[1] % part.step:
            raise CorruptCheckpoint(
                f"{part.stem}_blocks {list(stored.shape)} and _scales {list(scales.shape)} do not "
                "fit"
            )
        return _mxfp4_layout(stored.shape[1] // part.step, stored.shape[2] * BLOCK_COLUMNS)

    def read_quantized_matrix(self, name: str) -> QuantizedMatrix:
        """Return the codes and scales of a matrix in MXFP4."""
        part = self._parts[name]
        blocks, scales = (
            self._raw.get(f"{part.stem}{suffix}")[part.expert, part.first :: part.step]
            for suffix in ("_blocks", "_scales")
        )
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        return QuantizedMatrix(codes, scales.contiguous(), None)

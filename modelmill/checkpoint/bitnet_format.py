"""Checkpoints of ternary weights, −1, 0 and 1 times a scale (BitNet b1.58, arXiv:2402.17764).

``quantization_mode`` "offline": "<stem>.weight" is [N/4, K] uint8, row i of which holds rows i,
i + N/4, i + N/2 and i + 3N/4 of the matrix plus 1, two bits each from the lowest on;
``weight_scale`` multiplies them (``linear_class`` "autobitlinear") or divides them ("bitlinear").
"online": matrices are stored as they were trained, and made ternary when they are read: each is
divided by the mean of its absolute values, rounded, bounded to ±1, and multiplied again.

Matrices are expanded when they are read. Activations stay in the engine's dtype, where the
original rounds them to 8 bits by token; -q int8 does nearly the same (W8A8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, ConvertedContainer, TensorInfo
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote

QUANT_METHOD = "bitnet"
TERNARY_DTYPE_LABEL, STORED_DTYPE_NAME = "ternary", "uint8"
ROWS_PER_BYTE = 4
MIN_ABS_MEAN_SCALE = 1e-5
UNQUANTIZED_MODULES = ("embed_tokens", "lm_head")
UNSUPPORTED_ADVICE = "take the checkpoint with bfloat16 weights"


@dataclass(frozen=True)
class BitNetSettings:
    """What a ``quantization_config`` says of ternary weights.

    Attributes:
        path: Of the checkpoint, for messages.
        online: Whether matrices are made ternary when they are read.
        divides: Whether the stored scale divides.
        kept: Parts of names of modules that stay as they are.
    """

    path: Path
    online: bool
    divides: bool
    kept: tuple[str, ...]


def read_settings(settings: Any, path: Path) -> BitNetSettings | None:
    """The settings of a checkpoint of ternary weights; None for other methods.

    Raises:
        CheckpointError: for values that are not known.
    """
    if not isinstance(settings, Mapping) or settings.get("quant_method") != QUANT_METHOD:
        return None
    linear = _read_enum_setting(settings, "linear_class", ("bitlinear", "autobitlinear"), path)
    mode = _read_enum_setting(settings, "quantization_mode", ("offline", "online"), path)
    if settings.get("use_rms_norm"):
        raise CheckpointError(
            f"{path}: quantization_config.use_rms_norm is not supported: a norm in front of every "
            f"matrix; {UNSUPPORTED_ADVICE}"
        )
    kept = settings.get("modules_to_not_convert") or []
    if not isinstance(kept, list):
        raise CheckpointError(
            f"{path}: quantization_config.modules_to_not_convert must be a list, not "
            f"{quote(kept, 60)}"
        )
    divides = linear == "bitlinear"
    names = (*UNQUANTIZED_MODULES, *map(str, kept))
    return BitNetSettings(path, mode == "online" and not divides, divides, names)


def _read_enum_setting(
    settings: Mapping[str, Any], key: str, known: tuple[str, ...], path: Path
) -> str:
    value = settings.get(key, known[0])
    if value not in known:
        raise CheckpointError(
            f"{path}: quantization_config.{key}={quote(value, 60)} is not supported (known: "
            f"{', '.join(known)}); {UNSUPPORTED_ADVICE}"
        )
    return str(value)


class DequantizingBitNetContainer(ConvertedContainer):
    """Shows ternary matrices with their scales applied; other tensors are unchanged."""

    def __init__(self, raw: Container, settings: BitNetSettings) -> None:
        """Find the matrices.

        Raises:
            CheckpointError: for packed values without a scale.
            CorruptCheckpoint: for a scale of several numbers.
        """
        super().__init__(raw)
        self._settings = settings
        here = set(raw.names())
        self._scales: dict[str, str] = {}
        self._ternary: set[str] = set()
        for name in sorted(here):
            if not self._is_ternary_candidate(name):
                continue
            info, scale = raw.tensor_info(name), f"{name}_scale"
            if settings.online:
                self._ternary.add(name)
            elif scale in here:
                if torch.Size(raw.tensor_info(scale).shape).numel() != 1:
                    raise CorruptCheckpoint(f"{settings.path}: {scale} must be one number")
                self._scales[name] = scale
            elif info.dtype == STORED_DTYPE_NAME:
                raise CheckpointError(
                    f"{settings.path}: {name} is stored in 2 bits without {scale}; download the "
                    "checkpoint again"
                )
        self._names = [name for name in raw.names() if name not in self._scales.values()]

    def _is_ternary_candidate(self, name: str) -> bool:
        is_matrix = name.endswith(".weight") and len(self._raw.tensor_info(name).shape) == 2
        return is_matrix and not any(kept in name for kept in self._settings.kept)

    @property
    def has_quantized_matrices(self) -> bool:
        """Whether any matrix is ternary."""
        return bool(self._scales or self._ternary)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        info = self._raw.tensor_info(name)
        if name not in self._scales:
            return info
        rows, columns = info.shape
        rows *= ROWS_PER_BYTE if info.dtype == STORED_DTYPE_NAME else 1
        return TensorInfo(name, (rows, columns), TERNARY_DTYPE_LABEL, info.nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Return the values, of a ternary matrix in float32."""
        stored = self._raw.get(name)
        if name in self._ternary:
            size = stored.float().abs().mean().clamp(min=MIN_ABS_MEAN_SCALE)
            return (stored.float() / size).round().clamp(-1, 1) * size
        if name not in self._scales:
            return stored
        scale = self._raw.get(self._scales[name]).float()
        if stored.dtype is torch.uint8:
            parts = [(stored >> 2 * part) & 3 for part in range(ROWS_PER_BYTE)]
            stored = torch.cat(parts).to(torch.int8) - 1
        return stored.float() / scale if self._settings.divides else stored.float() * scale

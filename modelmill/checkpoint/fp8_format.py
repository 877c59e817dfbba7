"""Checkpoints in 8-bit floats (e4m3): scales for blocks of a matrix, for its rows, or one for all.

``quant_method: fp8`` (DeepSeek V3, Qwen3-FP8: ``weight_scale_inv`` [⌈N/128⌉, ⌈K/128⌉], or one
scale), ``fbgemm_fp8`` (a scale a row) and compressed-tensors' ``float-quantized``. In spite of its
name ``weight_scale_inv`` multiplies, as ``weight_scale`` does: weight = scale · value.

Matrices are expanded when they are read; a recipe then quantizes them as it does others. Scales of
activations are ignored: activations stay in the engine's dtype, or the recipe quantizes them.
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

SUPPORTED_METHODS = ("fp8", "fbgemm_fp8")
COMPRESSED_TENSORS_FORMAT = "float-quantized"
STORED_DTYPE_NAME, FP8_DTYPE_LABEL = "float8_e4m3fn", "scaled e4m3"
WEIGHT_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale")
ACTIVATION_SCALE_SUFFIXES = ("input_scale", "activation_scale", "input_scale_ub")
UNSUPPORTED_ADVICE = "take the original checkpoint and build it with -q fp8 or int8"
ScaleBlockShape = tuple[int, int]


@dataclass(frozen=True)
class Fp8Settings:
    """What a ``quantization_config`` says of 8-bit floats.

    Attributes:
        path: Of the checkpoint, for messages.
        block: Rows and columns that share a scale, where scales are of blocks.
    """

    path: Path
    block: ScaleBlockShape | None


def read_settings(settings: Any, path: Path) -> Fp8Settings | None:
    """The settings of a checkpoint in 8-bit floats; None for other methods.

    Raises:
        CheckpointError: for blocks or formats that cannot be read.
    """
    if not isinstance(settings, Mapping):
        return None
    method = str(settings.get("quant_method", "")).lower()
    if method in SUPPORTED_METHODS:
        if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(
                f"{path} holds 8-bit floats of format {quote(settings['fmt'], 60)}, e4m3 can be "
                f"read; {UNSUPPORTED_ADVICE}"
            )
        return Fp8Settings(path, _parse_block_size(settings.get("weight_block_size"), path))
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping):
        return None
    formats = {
        str(_get_mapping_entry(each, "format") or settings.get("format"))
        for each in groups.values()
    }
    if formats != {COMPRESSED_TENSORS_FORMAT}:
        return None
    blocks = {_compressed_tensors_block_size(each, path) for each in groups.values()}
    if len(blocks) > 1:
        raise CheckpointError(
            f"{path} has 8-bit floats in blocks of several sizes; {UNSUPPORTED_ADVICE}"
        )
    return Fp8Settings(path, next(iter(blocks), None))


def _get_mapping_entry(group: Any, key: str) -> Any:
    return group.get(key) if isinstance(group, Mapping) else None


def _compressed_tensors_block_size(group: Any, path: Path) -> ScaleBlockShape | None:
    weights = _get_mapping_entry(group, "weights")
    bits, number = _get_mapping_entry(weights, "num_bits"), _get_mapping_entry(weights, "type")
    if (bits, number) != (8, "float"):
        raise CheckpointError(
            f"{path} is a compressed-tensors checkpoint of {quote(bits, 60)}-bit "
            f"{quote(number, 60)} weights in the format {COMPRESSED_TENSORS_FORMAT}, "
            f"where floats of 8 bits can be read; {UNSUPPORTED_ADVICE}"
        )
    return _parse_block_size(_get_mapping_entry(weights, "block_structure"), path)


def _parse_block_size(value: Any, path: Path) -> ScaleBlockShape | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        raise CheckpointError(
            f"{path}: quantization_config has blocks of {quote(value, 60)}, where a number of rows "
            f"and one of columns are needed; {UNSUPPORTED_ADVICE}"
        )
    return sizes[0], sizes[1]


class DequantizingFp8Container(ConvertedContainer):
    """Shows matrices of 8-bit floats with their scales applied; other tensors are unchanged."""

    def __init__(self, raw: Container, settings: Fp8Settings) -> None:
        """Find each matrix's scale.

        Raises:
            CheckpointError: for a matrix without a scale.
            CorruptCheckpoint: for a scale that does not fit its matrix.
        """
        super().__init__(raw)
        self._settings = settings
        here = set(raw.names())
        self._scale_names: dict[str, str] = {}
        for name in sorted(here):
            if name.endswith(".weight") and raw.tensor_info(name).dtype == STORED_DTYPE_NAME:
                self._scale_names[name] = self._find_scale_name(name, here)
        stems = {name.removesuffix(".weight") for name in self._scale_names}
        parts = {f"{stem}.{suffix}" for stem in stems for suffix in ACTIVATION_SCALE_SUFFIXES}
        hidden = parts.union(self._scale_names.values())
        self._names = [name for name in raw.names() if name not in hidden]

    def _find_scale_name(self, name: str, here: set[str]) -> str:
        stem = name.removesuffix(".weight")
        scales = [each for suffix in WEIGHT_SCALE_SUFFIXES if (each := f"{stem}.{suffix}") in here]
        if len(scales) != 1:
            raise CheckpointError(
                f"{self._settings.path}: {name} is stored in 8-bit floats with "
                f"{len(scales)} scales, where one of {' and '.join(WEIGHT_SCALE_SUFFIXES)} is "
                "needed; "
                "download the checkpoint again"
            )
        weight, scale = self._raw.tensor_info(name), self._raw.tensor_info(scales[0])
        if len(weight.shape) != 2 or not self._scale_fits_weight(weight, scale):
            blocks = f" in blocks of {self._settings.block}" if self._settings.block else ""
            raise CorruptCheckpoint(
                f"{self._settings.path}: {scales[0]}, {scale.dtype} {list(scale.shape)}, does not "
                f"fit {name} {list(weight.shape)}{blocks}; download the checkpoint again"
            )
        return scales[0]

    def _scale_fits_weight(self, weight: TensorInfo, scale: TensorInfo) -> bool:
        rows, columns = weight.shape
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if self._settings.block is not None:
            block_rows, block_columns = self._settings.block
            shapes.append((-(-rows // block_rows), -(-columns // block_columns)))
        return scale.decoded_dtype.is_floating_point and tuple(scale.shape) in shapes

    @property
    def has_quantized_matrices(self) -> bool:
        """Whether any matrix is in 8-bit floats."""
        return bool(self._scale_names)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        info = self._raw.tensor_info(name)
        scale_name = self._scale_names.get(name)
        if scale_name is None:
            return info
        nbytes = info.nbytes + self._raw.tensor_info(scale_name).nbytes
        return TensorInfo(name, info.shape, FP8_DTYPE_LABEL, nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Return the values, of a matrix of 8-bit floats in float32."""
        stored = self._raw.get(name)
        scale_name = self._scale_names.get(name)
        if scale_name is None:
            return stored
        rows, columns = stored.shape
        scale = self._raw.get(scale_name).float()
        if scale.numel() == 1 or scale.numel() == rows == scale.shape[0]:
            return stored.float() * scale.reshape(-1, 1)
        assert self._settings.block is not None, "checked with the shapes"
        block_rows, block_columns = self._settings.block
        scale = scale.repeat_interleave(block_rows, 0)[:rows]
        return stored.float() * scale.repeat_interleave(block_columns, 1)[:, :columns]

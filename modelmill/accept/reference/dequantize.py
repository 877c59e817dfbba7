"""Expands quantized checkpoints in float64 for the reference, from the formats' descriptions.

GPTQ: word w of qweight [K·b/32, N] holds rows K of code w·(32/b) + i at bit b·i; zeros along N,
stored less one except in gptq_v2; the group of column k is g_idx[k]. AWQ: word w of qweight [K,
N/8] holds output 8w + (0 2 4 6 1 3 5 7)[i] at bit 4i. compressed-tensors: word w of weight_packed
[N, …] holds value + 2^(b−1) of column w·(32/b) + i at bit b·i. 8-bit floats (e4m3): sign, 4 bits of
exponent with bias 7, 3 of mantissa; a scale for each block of the matrix, row, or matrix. BitNet:
byte row w holds rows w + i·N/4 plus 1 at bit 2i; the scale multiplies, of a "bitlinear" it divides;
"online" matrices W become mean|W| · clip(round(W / mean|W|), −1, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelmill.accept.reference.tensor_source import RawContainer

Matrix = NDArray[np.float64]
QUANTIZED_WEIGHT_SUFFIXES = ("qweight", "weight_scale", "weight_scale_inv")


class DequantizedContainer:
    """Shows packed matrices as "<stem>.weight" [N, K] float64 ([K, N] for GPT-2)."""

    def __init__(self, raw: RawContainer, config: Mapping[str, Any]) -> None:
        self._raw = raw
        self.metadata: Mapping[str, Any] = raw.metadata
        self._settings: Mapping[str, Any] = config["quantization_config"]
        self._transposed = config.get("model_type") == "gpt2"
        self._names = set(raw.names())
        self._stems = {
            n.rpartition(".")[0]
            for n in self._names
            if n.rpartition(".")[2] in QUANTIZED_WEIGHT_SUFFIXES
        }

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        plain = [
            n for n in self._names if n.rpartition(".")[0] not in self._stems or n.endswith(".bias")
        ]
        return [*plain, *(f"{stem}.weight" for stem in self._stems)]

    def tensor_info(self, name: str) -> Any:
        """Return shape and dtype of a tensor without reading it."""
        return (
            self.get(name)
            if name.rpartition(".")[0] in self._stems
            else self._raw.tensor_info(name)
        )

    def files(self) -> list[Path]:
        """Return nothing: the container has no files of its own."""
        return []

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name: a packed matrix in float64, another in its stored dtype."""
        stem, _, suffix = name.rpartition(".")
        if self._settings.get("quant_method") == "bitnet":
            return self._dequantize_bitnet_tensor(name)
        if stem not in self._stems or suffix != "weight":
            return self._raw.get(name)
        read = {"gptq": self._dequantize_gptq, "awq": self._dequantize_awq}.get(
            str(self._settings.get("quant_method")), self._dequantize_compressed_tensors
        )
        if f"{stem}.weight" in self._names:
            stored = self._raw.get(name)
            if stored.dtype is torch.float8_e4m3fn:
                return torch.from_numpy(self._dequantize_e4m3(stem, stored))
        dense = torch.from_numpy(np.ascontiguousarray(read(stem)))
        return dense.t() if self._transposed else dense

    def _dequantize_bitnet_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of a BitNet."""
        stored = self._raw.get(name)
        kept = ("embed_tokens", "lm_head", *(self._settings.get("modules_to_not_convert") or ()))
        is_auto = self._settings.get("linear_class") == "autobitlinear"
        if stored.ndim != 2 or any(each in name for each in kept):
            return stored
        values = stored.double().numpy()
        if f"{name}_scale" not in self._names:
            if not is_auto or self._settings.get("quantization_mode") != "online":
                return stored
            mean = max(np.abs(values).mean(), 1e-5)
            return torch.from_numpy(mean * np.clip(np.rint(values / mean), -1, 1))
        if stored.dtype is torch.uint8:
            fields = stored.numpy()[None] >> np.array([0, 2, 4, 6], np.uint8)[:, None, None]
            values = (fields & 3).astype(np.float64).reshape(-1, stored.shape[1]) - 1
        scale = float(self._raw.get(f"{name}_scale"))
        return torch.from_numpy(values * scale if is_auto else values / scale)

    def _dequantize_e4m3(self, stem: str, stored: torch.Tensor) -> Matrix:
        suffix = "weight_scale_inv" if f"{stem}.weight_scale_inv" in self._names else "weight_scale"
        scale = self._raw.get(f"{stem}.{suffix}").double().numpy()
        values = _e4m3_value_table()[stored.view(torch.uint8).numpy()]
        if scale.ndim < 2 or scale.shape[1] == 1:
            return values * scale.reshape(-1, 1)
        (height, width), (rows, columns) = self._fp8_block_shape(), values.shape
        return values * scale[np.arange(rows)[:, None] // height, np.arange(columns) // width]

    def _fp8_block_shape(self) -> tuple[int, int]:
        size = self._settings.get("weight_block_size")
        if size is None:
            group = next(iter(self._settings["config_groups"].values()))
            size = group["weights"]["block_structure"]
        return int(size[0]), int(size[1])

    def _get_as_uint32(self, name: str) -> NDArray[np.uint32]:
        return self._raw.get(name).numpy().view(np.uint32)

    def _dequantize_gptq(self, stem: str) -> Matrix:
        bits = int(self._settings.get("bits", 4))
        words, scales = (
            self._get_as_uint32(f"{stem}.qweight"),
            self._raw.get(f"{stem}.scales").double().numpy(),
        )
        codes = _unpack_bit_fields(words.T, bits)  # [N, K]
        zeros = _unpack_bit_fields(self._get_as_uint32(f"{stem}.qzeros"), bits).astype(
            np.float64
        )  # [G, N]
        zeros += 0 if self._settings.get("checkpoint_format") == "gptq_v2" else 1
        columns = codes.shape[1]
        if f"{stem}.g_idx" in self._names:
            of = self._raw.get(f"{stem}.g_idx").long().numpy()
        else:
            size = int(self._settings.get("group_size", 128))
            of = np.arange(columns) // (columns if size == -1 else size)
        return (codes - zeros[of].T) * scales[of].T

    def _dequantize_awq(self, stem: str) -> Matrix:
        scales = self._raw.get(f"{stem}.scales").double().numpy()  # [G, N]
        # [K, N], [G, N]
        codes, zeros = (
            _unpack_awq(self._get_as_uint32(f"{stem}.{part}")) for part in ("qweight", "qzeros")
        )
        of = np.arange(len(codes)) // -(-len(codes) // len(scales))
        return ((codes.astype(np.float64) - zeros[of]) * scales[of]).T

    def _dequantize_compressed_tensors(self, stem: str) -> Matrix:
        scale = self._raw.get(f"{stem}.weight_scale").double().numpy()
        if f"{stem}.weight_packed" in self._names:
            rows, columns = self._raw.get(f"{stem}.weight_shape").flatten().tolist()
            words = self._get_as_uint32(f"{stem}.weight_packed")
            bits = 4 if words.shape[1] == -(-columns // 8) else 8
            values = _unpack_bit_fields(words, bits)[:, :columns].astype(np.float64) - 2 ** (
                bits - 1
            )
        else:
            values, bits = self._raw.get(f"{stem}.weight").double().numpy(), 8
            rows, columns = values.shape
        scale = np.broadcast_to(
            scale.reshape(-1, 1) if scale.ndim < 2 else scale, (rows, max(scale.size // rows, 1))
        )
        groups = scale.shape[1]
        of = np.arange(columns) // -(-columns // groups)
        if f"{stem}.weight_g_idx" in self._names:
            stored = self._raw.get(f"{stem}.weight_g_idx").long().numpy()
            of = stored if stored.min() >= 0 else of
        zero: Any = np.zeros((1, 1))
        if f"{stem}.weight_zero_point" in self._names:
            kept = self._raw.get(f"{stem}.weight_zero_point")
            if kept.dtype is torch.int32 and len(kept) != rows:
                zero = _unpack_bit_fields(kept.numpy().view(np.uint32).T, bits).T[:rows].astype(
                    np.float64
                ) - 2 ** (bits - 1)
            else:
                zero = kept.double().numpy().reshape(-1, groups)
        spread = np.broadcast_to(zero, (rows, groups))
        return (values - spread[:, of]) * scale[:, of]


def _e4m3_value_table() -> Matrix:
    """The 256 values of e4m3 by their bits; ±0x7f is no number."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    size[bits & 127 == 127] = np.nan
    return np.where(bits >> 7 == 1, -size, size)


def _unpack_bit_fields(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Unpack [R, C] to [R, C · 32/bits], the lowest bits of a word first."""
    parts = [(words >> np.uint32(shift)) & np.uint32(2**bits - 1) for shift in range(0, 32, bits)]
    return np.stack(parts, -1).reshape(len(words), -1)


def _unpack_awq(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Unpack [R, N/8] to [R, N]."""
    out = np.empty((words.shape[0], words.shape[1] * 8), np.uint32)
    for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out[:, place::8] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
    return out

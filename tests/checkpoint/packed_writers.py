"""Seeded writers of the formats that other tools quantize to, with the float64 weights that they
mean.

Written from the formats' descriptions, bit by bit, so that nothing here can share an error with
what reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Parts = dict[str, torch.Tensor]


@dataclass
class SeededMatrix:
    """codes [N, K] 0…2^bits − 1; zeros [N, G]; scales [N, G] as float64 of ``dtype``'s values; of
    [K]: groups.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_index: np.ndarray
    dtype: torch.dtype

    @property
    def weight(self) -> np.ndarray:
        return (self.codes - self.zeros[:, self.group_index]) * self.scales[:, self.group_index]


def seeded_matrix(
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> SeededMatrix:
    """A seeded matrix whose entries have about the size of a projection's; group −1: whole rows."""
    source = np.random.default_rng(abs(seed))
    size = columns if group == -1 else group
    groups = -(-columns // size)
    codes = source.integers(0, 2**bits, (rows, columns))
    middle = 2 ** (bits - 1)
    zeros = (
        np.full((rows, groups), middle)
        if symmetric
        else source.integers(1, 2**bits, (rows, groups))
    )
    ideal_scale = torch.from_numpy(
        source.uniform(0.5, 1.5, (rows, groups)) / (middle * columns**0.5)
    )
    of = np.arange(columns) // size
    if act_order:
        of = of[source.permutation(columns)]
    return SeededMatrix(codes, zeros, ideal_scale.to(dtype).double().numpy(), of, dtype)


def pack_fields(fields: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C] → int32 [R, ⌈C · bits/32⌉], the first field in the lowest bits."""
    count = 32 // bits
    rows, columns = fields.shape
    words = np.zeros((rows, -(-columns // count)), np.uint32)
    for column in range(columns):
        words[:, column // count] |= fields[:, column].astype(np.uint32) << np.uint32(
            bits * (column % count)
        )
    return torch.from_numpy(words.view(np.int32).copy())


def gptq_tensors(d: SeededMatrix, bits: int, *, second: bool = False, g_idx: bool = True) -> Parts:
    """qweight, qzeros, scales, g_idx; second: of gptq_v2."""
    stored = d.zeros if second else d.zeros - 1
    parts = {
        "qweight": pack_fields(d.codes, bits).t().contiguous(),
        "qzeros": pack_fields(stored.T, bits),
        "scales": torch.from_numpy(d.scales.T.copy()).to(d.dtype),
    }
    return parts | ({"g_idx": torch.from_numpy(d.group_index).to(torch.int32)} if g_idx else {})


def awq_tensors(d: SeededMatrix) -> Parts:
    """qweight, qzeros, scales of version gemm."""

    def along_n(fields: np.ndarray) -> torch.Tensor:
        shuffled = np.empty_like(fields)
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            shuffled[:, nibble::8] = fields[:, output::8]
        return pack_fields(shuffled, 4)

    scales = torch.from_numpy(d.scales.T.copy()).to(d.dtype)
    return {"qweight": along_n(d.codes.T), "qzeros": along_n(d.zeros.T), "scales": scales}


def compressed_tensors(
    d: SeededMatrix, bits: int, *, symmetric: bool, pack: bool = True, pack_zeros: bool = True
) -> Parts:
    """weight_packed and weight_shape, or int8 weight; weight_scale; weight_zero_point; weight_g_idx
    if reordered.
    """
    middle, rows = 2 ** (bits - 1), len(d.codes)
    scales = torch.from_numpy(d.scales.copy()).to(d.dtype)
    if pack:
        parts = {
            "weight_packed": pack_fields(d.codes, bits),
            "weight_shape": torch.tensor(d.codes.shape),
        }
    else:
        parts = {"weight": torch.from_numpy(d.codes - middle).to(torch.int8)}
    parts["weight_scale"] = scales
    if not symmetric:
        zeros = (
            pack_fields(d.zeros.T, bits).t().contiguous()
            if pack_zeros
            else torch.from_numpy(d.zeros - middle)
        )
        parts["weight_zero_point"] = zeros if pack_zeros else zeros.to(torch.int8)
        assert zeros.shape[0] in (rows, -(-rows * bits // 32))
    if bool((np.diff(d.group_index) < 0).any()):
        parts["weight_g_idx"] = torch.from_numpy(d.group_index).to(torch.int32)
    return parts


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Parts) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder

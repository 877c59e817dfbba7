"""The weight formats that benchmarks fill models with."""

from __future__ import annotations

import pytest
import torch

from benchmarks.weight_formats import WEIGHT_FORMATS, weight_quantizer


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_every_format_packs_a_matrix_as_it_says(name: str) -> None:
    matrix = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    packed = weight_quantizer(name)(matrix, torch.bfloat16)
    assert packed.format == WEIGHT_FORMATS[name][0]
    assert packed.dequantize().shape == matrix.shape
    error = (packed.dequantize() - matrix).norm() / matrix.norm()
    assert error < (0.3 if "w4" in name or "int4" in name or name == "mxfp4" else 0.06)

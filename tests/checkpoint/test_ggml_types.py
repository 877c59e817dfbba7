"""Block formats against gguf-py's gguf.quants, an independent implementation, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from modelmill.checkpoint import ggml_types
from modelmill.checkpoint.ggml_types import GGML_TYPES, dequantize_ggml_blocks

BLOCKS = {
    number: ggml_type
    for number, ggml_type in GGML_TYPES.items()
    if ggml_type.dequantize is not None
}
KNOWN_TO_GGUF = [number for number, ggml_type in BLOCKS.items() if ggml_type.name != "Q8_K"]


def expand(number: int, data: np.ndarray) -> np.ndarray:
    ggml_type = GGML_TYPES[number]
    out = torch.empty(data.size // ggml_type.block_bytes * ggml_type.block_values)
    dequantize_ggml_blocks(ggml_type, torch.from_numpy(data), out)
    return out.numpy()


def test_numbers_names_and_sizes_are_those_of_the_gguf_package():
    for number, ggml_type in GGML_TYPES.items():
        gguf_type = gguf.GGMLQuantizationType(number)
        assert gguf_type.name == ggml_type.name
        # Q8_1 never reaches a file; the package still counts its two halves as floats, ggml.h does
        # not.
        assert ggml_type.name == "Q8_1" or gguf.GGML_QUANT_SIZES[gguf_type] == (
            ggml_type.block_values,
            ggml_type.block_bytes,
        )
    assert set(GGML_TYPES) == {int(t) for t in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("number", KNOWN_TO_GGUF, ids=lambda n: GGML_TYPES[n].name)
def test_random_bytes_expand_to_the_same_floats(number):
    # Every bit pattern of scales is met, NaN and infinity among them.
    data = np.random.default_rng(number).integers(
        0, 256, 500 * GGML_TYPES[number].block_bytes, dtype=np.uint8
    )
    with np.errstate(all="ignore"):
        expected = dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType(number)).reshape(-1)
    np.testing.assert_array_equal(expand(number, data), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_real_values_come_back_within_the_formats_step(name):
    ggml_type = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    data = quantize(values, ggml_type)
    actual = expand(int(ggml_type), data.reshape(-1)).reshape(8, 64)
    np.testing.assert_allclose(actual, values, atol=0.5 if "4" in name else 0.25)


def test_q8_k_is_a_float_scale_times_signed_bytes():
    scale = np.array([0.5, -2.0], dtype=np.float32)
    quants = np.random.default_rng(0).integers(-128, 128, (2, 256), dtype=np.int8)
    sums = np.full((2, 32), 77, dtype=np.uint8)
    data = np.concatenate([scale[:, None].view(np.uint8), quants.view(np.uint8), sums], axis=1)
    np.testing.assert_array_equal(
        expand(15, data.reshape(-1)).reshape(2, 256), scale[:, None] * quants
    )


def test_chunks_do_not_change_the_result(monkeypatch):
    data = np.random.default_rng(0).integers(0, 100, 37 * 144, dtype=np.uint8)
    expected = expand(12, data)
    monkeypatch.setattr(ggml_types, "CHUNK_VALUES", 512)
    np.testing.assert_array_equal(expand(12, data), expected)


def test_labels_tell_plain_types_by_torch_name():
    assert (GGML_TYPES[0].label, GGML_TYPES[30].label, GGML_TYPES[3].label) == (
        "float32",
        "bfloat16",
        "Q4_1",
    )
    assert GGML_TYPES[14].is_supported
    assert not GGML_TYPES[20].is_supported

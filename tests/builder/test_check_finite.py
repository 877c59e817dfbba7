from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.builder import tensor_plan as module
from modelmill.builder.tensor_plan import check_finite
from modelmill.core.errors import CorruptCheckpoint

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 99),
    st.sampled_from(
        [("NaN", float("nan")), ("infinity", float("inf")), ("infinity", -float("inf"))]
    ),
    st.sampled_from(FLOATS),
)
def test_one_bad_value_anywhere_is_found_and_named(at, bad, dtype):
    tensor = torch.zeros(10, 10, dtype=dtype)
    check_finite("w", tensor)
    tensor.view(-1)[at] = bad[1]
    with pytest.raises(CorruptCheckpoint, match=f"the tensor w holds {bad[0]}"):
        check_finite("w", tensor)
    with pytest.raises(CorruptCheckpoint, match="w holds"):
        check_finite("w", tensor.t())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_scanned_too(dtype):
    tensor = torch.ones(8).to(dtype)
    check_finite("w", tensor)
    tensor[3] = torch.tensor(float("nan")).to(dtype)
    with pytest.raises(CorruptCheckpoint, match="NaN"):
        check_finite("w", tensor)


def test_extremes_integers_empty_and_scalars_pass():
    for dtype in FLOATS:
        check_finite(
            "w", torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
        )
    check_finite("w", torch.arange(3))
    check_finite("w", torch.ones(2, dtype=torch.bool))
    check_finite("w", torch.empty(0, 4))
    check_finite("w", torch.tensor(1.0))


def test_every_chunk_is_looked_at(monkeypatch):
    monkeypatch.setattr(module, "FINITE_CHECK_CHUNK_VALUES", 3)
    tensor = torch.zeros(8)
    tensor[7] = float("inf")
    with pytest.raises(CorruptCheckpoint, match="infinity"):
        check_finite("w", tensor)

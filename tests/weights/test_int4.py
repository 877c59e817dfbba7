"""How int4 weights are held: nothing is lost in packing, and what is multiplied with is what was
stored.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import CorruptArtifact
from modelmill.ops import registry
from modelmill.ops.int4_linear import pack_codes, unpack_codes
from modelmill.weights import base
from modelmill.weights.int4 import Int4Weight

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 300))


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(size=SIZES)
def test_codes_come_back_from_their_bytes(size: tuple[int, int]) -> None:
    codes = torch.randint(0, 16, size, generator=torch.Generator().manual_seed(size[1]))
    packed = pack_codes(codes)
    assert packed.shape == (size[0], -(-size[1] // 32) * 16)
    assert torch.equal(unpack_codes(packed, size[1]).long(), codes)


def test_the_layout_is_the_documented_one() -> None:
    codes = torch.zeros(1, 70, dtype=torch.long)
    codes[0, 3], codes[0, 19], codes[0, 32 + 31], codes[0, 64] = 5, 9, 7, 2
    row = pack_codes(codes)[0].tolist()
    assert {at: byte for at, byte in enumerate(row) if byte} == {
        3: 5 | 9 << 4,
        16 + 15: 7 << 4,
        32: 2,
    }


@settings(max_examples=60, deadline=None)
@given(size=SIZES, group=st.sampled_from([32, 64, 128, -1]), symmetric=st.booleans())
def test_nearest_errs_by_half_a_step_and_stores_what_it_says(
    size: tuple[int, int], group: int, symmetric: bool
) -> None:
    weight = random_matrix(*size, seed=size[0])
    weight[0] = 0.0
    packed = Int4Weight.pack(weight, torch.float32, group_size=group, symmetric=symmetric)
    scale = packed.scale.float().abs().repeat_interleave(packed.group_size, 1)[:, : size[1]]
    # 7 levels on one side of a symmetric grid: its other end may lack a whole step; float16 rounds
    # the grid itself
    steps = 1.0 if symmetric else 0.5
    assert bool(
        ((packed.dequantize() - weight).abs() <= (steps + 0.02) * scale + 1e-3 * weight.abs()).all()
    )
    assert packed.shape == size
    stored = packed.tensors()
    info = base.packed_tensor_specs(
        "int4", size, torch.float32, group_size=group, symmetric=symmetric
    )
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == info
    assert list(stored) == list(info), "written in the order announced"
    again = base.from_tensors("int4", stored)
    assert torch.equal(again.dequantize(), packed.dequantize())
    x = random_matrix(3, size[1], seed=1)
    torch.testing.assert_close(
        packed.matmul(x, None, registry.select_backends("cpu")),
        x @ packed.dequantize().T,
        rtol=1e-4,
        atol=1e-4,
    )


def test_16_levels_are_held_exactly() -> None:
    """A weight that lies on 16 levels already is not changed: GGUF's Q4_1 fits a group of 32."""
    codes = torch.randint(0, 16, (6, 96), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scale = torch.rand(6, 3).half().float() + 0.1
    weight = codes * scale.half().float().repeat_interleave(32, 1) - 0.75
    packed = Int4Weight.pack(weight, torch.float32, group_size=32)
    assert torch.equal(packed.dequantize(), weight)
    assert torch.equal(packed.codes().long(), codes)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [(0, 128), (128, 256), (128, 300), (0, 300)])
def test_a_slice_is_the_slice_of_what_is_multiplied_with(
    columns: tuple[int, int], symmetric: bool
) -> None:
    packed = Int4Weight.pack(
        random_matrix(20, 300), torch.float32, group_size=64, symmetric=symmetric
    )
    rows = [(2, 5), (11, 20)]
    part = packed.slice(rows, columns)
    expected = torch.cat([packed.dequantize()[a:b, slice(*columns)] for a, b in rows])
    assert torch.equal(part.dequantize(), expected)
    assert torch.equal(base.from_tensors("int4", part.tensors()).dequantize(), expected)
    assert part.column_slice_alignment == 64


def test_a_slice_inside_a_group_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="between groups"):
        Int4Weight.pack(random_matrix(4, 256), torch.float32).slice([(0, 4)], (64, 256))


@pytest.mark.parametrize("sizes", [[300, 48], [0, 64], [400, 64], [300, 32]], ids=str)
def test_damaged_sizes_are_named(sizes: list[int]) -> None:
    stored = Int4Weight.pack(random_matrix(4, 300), torch.float32, group_size=64).tensors()
    with pytest.raises(CorruptArtifact, match="int4"):
        base.from_tensors("int4", stored | {"sizes": torch.tensor(sizes, dtype=torch.int32)})

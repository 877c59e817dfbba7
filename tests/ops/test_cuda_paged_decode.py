"""Launch sizes of the kernels that decode over pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops.attention_support import AttentionPhase, AttentionProblem
from modelmill.ops.cuda.attention import paged_decode, paged_decode8, paged_decode16
from modelmill.ops.kernel_support import Kernel


@given(
    st.integers(1, 9000),
    st.integers(1, 40_000),
    st.integers(1, 900),
    st.sampled_from([48, 64, 128]),
)
def test_splits_are_powers_of_two_with_keys_for_all_warps(
    pairs: int, keys: int, room: int, least: int
) -> None:
    splits = paged_decode.num_splits(pairs, keys, room, least)
    assert splits in (1, 2, 4, 8)
    assert splits == 1 or pairs * splits <= room
    assert splits == 1 or keys > (splits - 1) * least


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 5000), st.data())
def test_forms_are_all_that_a_step_can_meet(
    heads: int, most: int, longest: int, data: st.DataObject
) -> None:
    def splits_for(batch: int, keys: int) -> int:
        return paged_decode.num_splits(batch * heads, keys, 396, 64)

    listed = paged_decode.warmup_sizes(splits_for, most, longest)
    assert all(1 <= batch <= most and 1 <= keys <= longest for batch, keys in listed)
    known = {splits_for(batch, keys) for batch, keys in listed}
    assert len(known) == len(listed)
    batch, keys = data.draw(st.integers(1, most)), data.draw(st.integers(1, longest))
    assert splits_for(batch, keys) in known


def test_what_cannot_be_read_is_refused() -> None:
    caches = (torch.zeros(3, 2, 16, 64), torch.zeros(3, 2, 16, 64))
    tables = torch.zeros(2, 4, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    indices = (tables, starts, starts[:2])
    assert paged_decode.supports_cache_and_indices(caches, indices)
    assert not paged_decode.supports_cache_and_indices(
        tuple(t.transpose(0, 1) for t in caches), indices
    )
    assert not paged_decode.supports_cache_and_indices(caches, (tables.long(), *indices[1:]))
    assert not paged_decode.supports_cache_and_indices(caches, (tables[:, :0], *indices[1:]))
    assert not paged_decode.supports_cache_and_indices(
        (caches[0], torch.zeros(3 * 2 * 16 * 64 + 1)[1:].view(3, 2, 16, 64)), indices
    )


@pytest.mark.parametrize(
    "kernel",
    [*paged_decode16.KERNELS, *paged_decode8.KERNELS],
    ids=lambda each: each.run.__module__,
)
def test_pages_have_8_to_128_tokens(kernel: Kernel) -> None:
    scaled = kernel in paged_decode8.KERNELS
    dtype = torch.int8 if scaled else torch.bfloat16
    problem = AttentionProblem(
        1, 1, 1, 2, 2, 2, 64, 8, torch.bfloat16, (dtype, dtype), scaled, torch.device("cuda"),
        True, AttentionPhase.DECODE,
    )  # fmt: skip
    served = [
        each
        for each in (4, 8, 24, 32, 128, 256)
        if kernel.range.covers(problem._replace(page_size=each))
    ]
    assert served == [8, 32, 128]


def test_a_number_alone_may_have_any_stride() -> None:
    two = torch.zeros(2, 2, dtype=torch.int32)
    assert paged_decode.supports_indices((two, two[:1, 0]))
    assert not paged_decode.supports_indices((two, two[:, 0]))
    assert not paged_decode.supports_indices((two.long(),))

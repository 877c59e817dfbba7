"""The sweep over launch configs of experts: what it changes is there."""

from __future__ import annotations

import pytest

from benchmarks import moe_tiles


@pytest.mark.parametrize("tokens", moe_tiles.TOKENS)
@pytest.mark.parametrize("weight_format", moe_tiles.DECODE)
def test_every_candidate_changes_something_that_exists(weight_format: str, tokens: int) -> None:
    tried = moe_tiles.candidates(weight_format, tokens, moe_tiles.moe_step.QWEN3_30B_A3B)
    labels = []
    for label, context in tried:
        with context:
            labels.append(label)
    assert labels[0] == "default"
    assert len(set(labels)) == len(labels) > 3


def test_every_candidate_of_the_cuda_kernel_changes_something_that_exists() -> None:
    before = vars(moe_tiles.grouped_gemm_wq).copy()
    labels = []
    for label, context in moe_tiles.cuda_candidates():
        with context:
            changed = [name for name in moe_tiles.CUDA if _constant(name) is not before[name]]
            assert len(changed) == (label != "default"), label
            labels.append(label)
    assert len(set(labels)) == len(labels) > len(moe_tiles.CUDA)
    assert all(_constant(name) is before[name] for name in moe_tiles.CUDA)


def _constant(name: str) -> object:
    return vars(moe_tiles.grouped_gemm_wq)[name]

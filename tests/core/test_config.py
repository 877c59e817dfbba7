"""RunConfig refuses what makes no sense, in one line that names the flag."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.core.config import BuildConfig, RunConfig, config_from_dict
from modelmill.core.errors import UsageError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"threads": 0}, "--threads must be at least 1"),
        ({"max_num_seqs": "a"}, "--max-num-seqs must be an integer"),
        ({"max_num_batched_tokens": None}, "--max-num-batched-tokens must be an integer"),
        ({"kv_cache_bytes": -3}, "--kv-cache-bytes must be at least 1"),
        ({"max_model_len": True}, "--max-model-len must be an integer"),
        ({"page_size": 7}, "--page-size"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": "0.5"}, "--gpu-memory-utilization must be a number, not '0.5'"),
        ({"gpu_memory_utilization": True}, "--gpu-memory-utilization must be a number"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization must be in"),
        ({"page_size": 16.0}, "--page-size must be an integer, not 16.0"),
        ({"seed": "x"}, "--seed must be an integer, not 'x'"),
        ({"seed": None}, "--seed must be an integer"),
        (
            {"kernels": "linear=torch"},
            "--kernel must be OP=VARIANT pairs, a dict, not 'linear=torch'",
        ),
        ({"kernels": {"linear": 1}}, "--kernel takes OP=VARIANT"),
        ({"cuda_graphs": "off"}, "--cuda-graphs must be true or false, not 'off'"),
        ({"enable_prefix_caching": 1}, "--enable-prefix-caching must be true or false"),
        ({"device": 0}, "--device must be cpu, cuda or cuda:N, not 0"),
    ],
)
def test_what_makes_no_sense(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig(**bad)


def test_unset_counts_stay_unset() -> None:
    assert RunConfig().threads is None
    assert RunConfig(threads=2, kv_cache_bytes=1 << 20).threads == 2


def test_unknown_keys_are_named() -> None:
    with pytest.raises(UsageError, match="dtpye"):
        config_from_dict(BuildConfig, {"dtpye": "float32"}, "manifest.json")

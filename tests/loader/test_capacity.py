"""The longest sequence, the number of KV pages, and the error if there are too few."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelmill.core import memory_limits
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError, MissingDependency, UsageError
from modelmill.loader import capacity
from modelmill.loader.capacity import kv_pages_for_bytes, resolve_max_model_len
from modelmill.loader.device import available_cores, resolve_device, set_cpu_threads
from modelmill.nn.kv import ModelKVCacheSpec
from modelmill.nn.step import Step
from modelmill.ops.registry import select_backends
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny

SHAPE = ModelKVCacheSpec(2, 2, 8)


def test_counts() -> None:
    size = SHAPE.page_bytes(16, torch.float32)
    config = RunConfig(max_num_seqs=4)
    assert kv_pages_for_bytes(SHAPE, torch.float32, config, 100, 20 * size) == 19
    assert kv_pages_for_bytes(SHAPE, torch.float32, config, 100, 1 << 40) == 4 * 7
    run_config = RunConfig(max_num_seqs=4, kv_cache_bytes=10 * size)
    assert kv_pages_for_bytes(SHAPE, torch.float32, run_config, 100, 0) == 9


def test_ranks_have_as_many_pages_as_the_one_with_the_fewest() -> None:
    class Poor(TPGroup):
        def all_reduce_min(self, value: int) -> int:
            return min(value, 12)

    size = SHAPE.page_bytes(16, torch.float32)
    config = RunConfig(max_num_seqs=4)
    assert (
        kv_pages_for_bytes(SHAPE, torch.float32, config, 100, 20 * size, tp_group=Poor(0, 2)) == 11
    )
    with pytest.raises(CapacityError, match="--max-model-len"):
        kv_pages_for_bytes(SHAPE, torch.float32, config, 1000, 200 * size, tp_group=Poor(0, 2))


def test_too_little_says_what_would_fit() -> None:
    size = SHAPE.page_bytes(16, torch.float32)
    with pytest.raises(CapacityError, match="--max-model-len 80 would fit"):
        kv_pages_for_bytes(SHAPE, torch.float32, RunConfig(), 100, 6 * size)
    with pytest.raises(CapacityError, match="smaller model"):
        kv_pages_for_bytes(SHAPE, torch.float32, RunConfig(), 100, -5)


def test_more_than_there_is_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "modelmill.core.memory_limits.read_memory_info",
        lambda: memory_limits.MemoryInfo(1 << 16, 1 << 16),
    )
    with pytest.raises(CapacityError, match=r"would take 8\.00 MiB, .* may have 64\.00 KiB"):
        EngineCore(tiny.decoder(), RunConfig(kv_cache_bytes=1 << 30))
    # the limits bound the number of pages that can be used
    assert (
        EngineCore(
            tiny.decoder(), RunConfig(kv_cache_bytes=1 << 30, max_num_seqs=1, max_model_len=16)
        ).num_pages
        == 1
    )


def test_options_that_make_no_sense() -> None:
    for name in ("tpu", "cuda:x", "mps"):
        with pytest.raises(UsageError):
            resolve_device(name)
    with pytest.raises(MissingDependency):
        resolve_device("cuda:99")
    with pytest.raises(UsageError, match="exceeds the engine's 128"):
        EngineCore(tiny.decoder(), RunConfig(max_model_len=129))
    assert EngineCore(tiny.decoder(), RunConfig(max_num_seqs=2)).num_pages == 16


def test_threads() -> None:
    before = torch.get_num_threads()
    assert set_cpu_threads(2) == torch.get_num_threads() == 2
    assert (set_cpu_threads(5, 2), set_cpu_threads(1, 3)) == (2, 1)
    assert 1 <= available_cores() <= 4096
    set_cpu_threads(before)


def test_threads_stay_within_the_containers_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "modelmill.loader.device.os.sched_getaffinity", lambda _: set(range(64)), raising=False
    )
    monkeypatch.setattr("modelmill.loader.device.psutil.cpu_count", lambda logical: 64)
    for quota, cores in ((0.5, 1), (1.5, 2), (float("inf"), 64)):
        monkeypatch.setattr(
            "modelmill.loader.device.memory_limits.cgroup_cpu_quota", lambda quota=quota: quota
        )
        assert available_cores() == cores


def test_how_long_a_sequence_may_be() -> None:
    model = tiny.decoder(max_len=128)
    assert resolve_max_model_len(model, RunConfig(), None) == 128
    assert resolve_max_model_len(model, RunConfig(), 100) == 100
    assert resolve_max_model_len(model, RunConfig(max_model_len=50), 100) == 50
    with pytest.raises(UsageError, match="exceeds the engine's 100"):
        resolve_max_model_len(model, RunConfig(max_model_len=101), 100)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        resolve_max_model_len(model, RunConfig(max_model_len=0), None)


class RecordsSteps(nn.Module):
    """A model of latent attention that has no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.kv = ModelKVCacheSpec(1, 1, 8, True)
        self.num_decodes: list[int | None] = []

    def forward(self, step: Step) -> torch.Tensor:
        self.num_decodes.append(step.num_decodes)
        return torch.empty(1)


def test_the_largest_step_of_latent_attention_is_computed_in_both_ways() -> None:
    model = RecordsSteps()
    ops, limits = select_backends("cpu"), RunConfig(max_num_batched_tokens=64)
    capacity._run_largest_step(model, ops, limits, SINGLE_RANK)
    assert model.num_decodes == [0, None]

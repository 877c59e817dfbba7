"""Several engines share one memory."""

from __future__ import annotations

import json
from pathlib import Path

from modelmill.cli import serve
from modelmill.core.config import RunConfig
from modelmill.serve import memory_budget

GIB = 1 << 30


def test_engines_that_load_in_turn_fill_the_device_and_no_more() -> None:
    """Each takes exactly the bytes it may; the last one gets what is left."""
    total, weights = 80 * GIB, [14 * GIB, 2 * GIB, 1 * GIB]
    used = GIB // 2
    config = RunConfig(gpu_memory_utilization=0.9)
    kv = []
    for place, weight_bytes in enumerate(weights):
        own = memory_budget.with_gpu_memory_share(
            config, total - used, total, weight_bytes, weights[place + 1 :]
        )
        used_after = int(total * own.gpu_memory_utilization) - used
        kv.append(used_after - weight_bytes)
        used += used_after
    assert abs(used - 0.9 * total) < 1024
    assert max(kv) - min(kv) < 1024


def test_kv_bytes_that_were_given_are_for_all() -> None:
    assert (
        memory_budget.with_kv_budget_share(RunConfig(kv_cache_bytes=9000), 3).kv_cache_bytes == 3000
    )
    assert (
        memory_budget.with_kv_budget_share(RunConfig(kv_cache_bytes=9000), 1).kv_cache_bytes == 9000
    )
    assert memory_budget.with_kv_budget_share(RunConfig(), 3).kv_cache_bytes is None
    config = RunConfig(kv_cache_bytes=3000)
    assert memory_budget.with_cpu_cache_budget(config, 10**9, 2) is config
    assert memory_budget.with_gpu_memory_share(config, 10**9, 10**9, 5, [1, 2]) is config


def test_on_a_cpu_the_rest_is_divided() -> None:
    assert memory_budget.with_cpu_cache_budget(RunConfig(), 900, 2).kv_cache_bytes == 300
    assert memory_budget.with_cpu_cache_budget(RunConfig(), 900, 0).kv_cache_bytes is None


def test_room_is_left_for_engines_that_segment() -> None:
    """A language engine that loads first leaves what they will take, to the byte; a single engine
    takes all.
    """
    total, weight_bytes = 80 * GIB, 14 * GIB
    aside = memory_budget.segmentation_engine_bytes(3 * GIB, GIB)
    own = memory_budget.with_gpu_memory_share(
        RunConfig(gpu_memory_utilization=0.9), total - GIB, total, weight_bytes, [], aside
    )
    assert abs(int(total * own.gpu_memory_utilization) + aside - int(0.9 * total)) < 1024
    assert memory_budget.with_cpu_cache_budget(RunConfig(), 900, 0, aside).kv_cache_bytes == 900
    assert memory_budget.with_cpu_cache_budget(RunConfig(), 900, 1, aside).kv_cache_bytes == 450


def test_each_engine_knows_who_loads_before_it_and_after(tmp_path: Path) -> None:
    """Two that write text, around one that segments, which has no KV cache."""
    paths = [tmp_path / name for name in ("first", "eyes", "last")]
    for path, engine_type in zip(paths, ("language", "segmentation", "language"), strict=True):
        path.mkdir()
        (path / "manifest.json").write_text(json.dumps({"engine_type": engine_type}))
    first, _, last = serve._make_open_messages(serve.Args(engines=tuple(paths)))
    assert (first.num_loaded_before, len(first.later_weight_bytes)) == (0, 1)
    assert (last.num_loaded_before, len(last.later_weight_bytes)) == (1, 0)
    assert 0 < last.segment_bytes < first.segment_bytes, "it holds its weights by then"

"""KV pages and recurrent states of an engine share one amount of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError
from modelmill.loader import cache_split
from modelmill.loader.cache_split import with_split_cache_bytes
from tests.runtime import tiny

ARTIFACT: Any = SimpleNamespace(manifest=SimpleNamespace(build={"dtype": "float32"}))


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return tiny.hybrid()


def split(monkeypatch: pytest.MonkeyPatch, model: Any, nbytes: int, **options: Any) -> RunConfig:
    monkeypatch.setattr(cache_split, "build_rank_model", lambda *_: model)
    return with_split_cache_bytes(RunConfig(**options), ARTIFACT, nbytes)


def test_a_model_without_state_has_all_for_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    config = split(monkeypatch, tiny.decoder(), 5000)
    assert (config.kv_cache_bytes, config.state_cache_bytes) == (5000, None)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 2}, {"enable_prefix_caching": False, "max_num_seqs": 40}]
)
def test_pages_and_states_take_what_both_may(
    monkeypatch: pytest.MonkeyPatch, hybrid: Any, options: dict[str, Any]
) -> None:
    """An engine of that config takes no more, to the byte."""
    nbytes = 64 * hybrid.state.slot_bytes(torch.float32)
    options = {"max_num_seqs": 16, **options}
    config = split(monkeypatch, hybrid, nbytes, **options)
    assert config.kv_cache_bytes is not None
    assert config.state_cache_bytes is not None
    assert config.kv_cache_bytes + config.state_cache_bytes == nbytes
    sizes = {"kv_cache_bytes": config.kv_cache_bytes, "state_cache_bytes": config.state_cache_bytes}
    engine = tiny.make_engine(hybrid, **options, **sizes)
    assert engine.state_cache_bytes == config.state_cache_bytes
    assert engine.num_pages * engine.page_bytes <= config.kv_cache_bytes


def test_a_size_of_the_states_that_is_set_stays(
    monkeypatch: pytest.MonkeyPatch, hybrid: Any
) -> None:
    size = hybrid.state.slot_bytes(torch.float32)
    config = split(monkeypatch, hybrid, 64 * size, state_cache_bytes=5 * size, max_num_seqs=2)
    assert (config.kv_cache_bytes, config.state_cache_bytes) == (59 * size, 5 * size)


def test_too_little_for_one_sequence(monkeypatch: pytest.MonkeyPatch, hybrid: Any) -> None:
    size = hybrid.state.slot_bytes(torch.float32)
    with pytest.raises(CapacityError, match="the recurrent state of one sequence needs"):
        split(monkeypatch, hybrid, 2 * size)
    with pytest.raises(CapacityError, match="leave no memory for the KV cache"):
        split(monkeypatch, hybrid, 5 * size, state_cache_bytes=5 * size, max_num_seqs=2)

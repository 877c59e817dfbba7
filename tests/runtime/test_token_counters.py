"""What the loop counts is what its answers say; and how much of its pages prefixes may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from modelmill.core import memory_limits
from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.core.types import MEAN_POOLING, Request, TokenOutput
from modelmill.loader.capacity import max_idle_prefix_cache_pages
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny

GIB = 1 << 30


def count_tokens(events: Sequence[TokenOutput]) -> int:
    """Tokens of all answers, with those that ended them."""
    return sum(
        (t.token_id is not None) + (t.stop_token_id is not None) + len(t.replayed_ids or ())
        for t in events
    )


def run_and_check_counters(engine: EngineCore, requests: Sequence[Request]) -> list[TokenOutput]:
    """Runs them; the loop's counters are those of the answers."""
    before = engine.stats()
    for request in requests:
        engine.add(request)
    events = tiny.drain(engine)
    after = engine.stats()
    cached = {event.request_id: event.cached_tokens for event in events}
    assert all(cached[event.request_id] == event.cached_tokens for event in events), (
        "one number for a request"
    )
    assert after.output_tokens - before.output_tokens == count_tokens(events)
    assert after.prompt_tokens - before.prompt_tokens == sum(
        len(request.prompt) for request in requests
    )
    assert after.cached_tokens - before.cached_tokens == sum(cached.values())
    tiny.assert_idle(engine)
    return events


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"n": 5, "temperature": 1.0, "seed": 1},
        {"n": 12, "temperature": 1.0, "seed": 1},
        {"n": 2, "num_beams": 4},
        {"n": 3, "num_beams": 3, "early_stopping": True, "stop_token_ids": tuple(range(20, 60))},
        {"stop_token_ids": tuple(range(2, 50))},
        {"prompt_logprobs": 1, "logprobs": 2},
    ],
    ids=str,
)
def test_a_prompt_counts_once_and_tokens_as_answers_tell_them(
    options: dict[str, Any], overlap: bool
) -> None:
    """Also with n larger than the number of rows, so that some sequences recompute the prompt."""
    engine = tiny.make_engine(max_num_seqs=8, overlap=overlap and "num_beams" not in options)
    prompts = tiny.prompts(6, 20, 40)
    run_and_check_counters(engine, tiny.requests(prompts, tiny.params(**options)))
    run_and_check_counters(engine, tiny.requests(prompts, tiny.params(**options)))


def test_thrown_out_and_computed_again_counts_once() -> None:
    """What a prompt that was thrown out finds of its own is none of what others had computed."""
    engine = tiny.make_engine(tiny.decoder(), max_num_seqs=4, pages=9)
    options = tiny.params(
        max_tokens=30, ignore_eos=True, stop_token_ids=(96,), logit_bias={96: -100.0}
    )
    events = run_and_check_counters(engine, tiny.requests(tiny.prompts(4, 8, 20), options))
    assert engine.stats().preemptions > 0
    assert {event.cached_tokens for event in events} == {0}


def test_embedded_prompts_count_once() -> None:
    engine = tiny.make_engine()
    prompts = tiny.prompts(3, 20, 40)
    options = tiny.params(max_tokens=0)
    run_and_check_counters(
        engine,
        [
            Request(id=str(i), prompt=p, params=options, pooling=MEAN_POOLING)
            for i, p in enumerate(prompts)
        ],
    )


def talks(engine: EngineCore, users: int = 4, turns: int = 5) -> int:
    """Conversations with one beginning in common, a turn of each in turn; returns the tokens found
    in the cache.
    """
    system = tuple(range(5, 37))
    histories = [(*system, 40 + user) for user in range(users)]
    for turn in range(turns):
        for user, history in enumerate(histories):
            prompt = (*history, *range(50 + turn, 58 + turn))
            outputs = tiny.output_ids(
                run_and_check_counters(
                    engine, [Request(id="talk", prompt=prompt, params=tiny.params(max_tokens=6))]
                )
            )
            histories[user] = (*prompt, *outputs["talk", 0])
    return engine.stats().cached_tokens


def test_conversations_find_as_much_as_without_a_bound() -> None:
    """Their pages are fewer than may be kept, though strangers pass by between them, and memory
    stays.
    """
    per = tiny.decoder().kv.page_bytes(8, torch.float32)
    free, bound = (
        tiny.make_engine(pages=400),
        tiny.make_engine(pages=400, prefix_cache_bytes=80 * per),
    )
    assert talks(free) == talks(bound) > 1000
    for engine in (free, bound):
        run_and_check_counters(
            engine, tiny.requests(tiny.prompts(300, 30, 40, seed=3), tiny.params(max_tokens=2))
        )
    assert free.stats().touched_pages == 256
    stats = bound.stats()
    most_at_once = 16 * 6  # sequences of a step, pages of each
    assert stats.kept_pages == 80
    assert stats.touched_pages <= 80 + most_at_once


def test_how_much_prefixes_may_take() -> None:
    page = 1 << 20
    assert memory_limits.max_cached_prefix_bytes(9 * GIB) == 3 * GIB
    assert memory_limits.max_cached_prefix_bytes(2 * GIB) == GIB
    assert memory_limits.max_cached_prefix_bytes(GIB // 2) == GIB // 2
    assert max_idle_prefix_cache_pages(RunConfig(), 9 * 1024, page, "cpu") == 3 * 1024
    # who gives the cache a size has said what it may take; a GPU's is taken at once
    assert (
        max_idle_prefix_cache_pages(RunConfig(kv_cache_bytes=9 * GIB), 9 * 1024, page, "cpu")
        == 9 * 1024
    )
    assert max_idle_prefix_cache_pages(RunConfig(), 9 * 1024, page, "cuda:0") == 9 * 1024
    assert (
        max_idle_prefix_cache_pages(
            RunConfig(prefix_cache_bytes=5 * page + 7), 9 * 1024, page, "cuda:0"
        )
        == 5
    )
    assert (
        max_idle_prefix_cache_pages(RunConfig(prefix_cache_bytes=99 * GIB), 1024, page, "cpu")
        == 1024
    )
    assert (
        max_idle_prefix_cache_pages(RunConfig(enable_prefix_caching=False), 1024, page, "cpu") == 0
    )
    with pytest.raises(UsageError, match="--prefix-cache-bytes must be at least 1"):
        RunConfig(prefix_cache_bytes=0)

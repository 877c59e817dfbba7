"""Pages behind the window of every layer are freed: bounded memory, and not one token differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.kv_page_counts import (
    first_page_in_use,
    max_fitting_length,
    max_sequence_pages,
    max_sequence_pages_in_groups,
)
from modelmill.core.types import Request
from modelmill.nn.decoder import Decoder
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny

PAGE = 8
Events = tiny.Events


def model(window: int = 20, *, frees: bool = True, max_len: int = 512) -> Decoder:
    """A model whose layers all have a window, and which keeps all pages unless it ``frees``."""
    made = tiny.decoder(window=window, max_len=max_len)
    assert made.kv.window == window
    if not frees:
        made.kv = replace(made.kv, window=None)
    return made


def engine(*, frees: bool = True, window: int = 20, **options: Any) -> EngineCore:
    options = {"max_model_len": 512, "max_num_batched_tokens": 24, **options}
    return tiny.make_engine(model(window, frees=frees), **options)


def run_counting_pages(core: EngineCore, requests: Sequence[Request]) -> tuple[Events, int]:
    """The outputs, and the most pages that were in use at once."""
    pool, counts = core.scheduler.pool, [0]
    outputs = tiny.run_watched(
        core, requests, lambda: counts.append(pool.count - pool.num_available)
    )
    return outputs, max(counts)


def long_requests(count: int = 3, **options: Any) -> list[Request]:
    """Prompts and answers of many windows."""
    prompts = tiny.prompts(count, low=120, high=150, seed=4)
    return tiny.requests(prompts, tiny.params(max_tokens=90, ignore_eos=True, **options))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [1, 5, 20, 33])
def test_memory_is_bounded_by_the_window(window: int, overlap: bool, prefix_caching: bool) -> None:
    options = {"window": window, "overlap": overlap, "enable_prefix_caching": prefix_caching}
    requests = long_requests(1)
    outputs, most = run_counting_pages(engine(**options), requests)
    expected, unbounded = run_counting_pages(engine(frees=False, **options), requests)
    assert outputs == expected
    assert most <= max_sequence_pages(240, PAGE, window, 24) < unbounded
    assert unbounded >= 210 // PAGE


def test_a_sequence_is_longer_than_the_pool() -> None:
    """The pool has the pages of one window and one step; the sequence fills 26 pages."""
    pages = max_sequence_pages(512, PAGE, 20, 24)
    small = engine(pages=pages)
    requests = long_requests(1)
    outputs, _ = run_counting_pages(small, requests)
    assert outputs == run_counting_pages(engine(frees=False), requests)[0]
    assert small.num_pages == pages < 210 // PAGE
    assert small.stats().preemptions == 0


def test_logits_are_the_same_bit_for_bit() -> None:
    ids = [list(prompt) for prompt in tiny.prompts(3, low=90, high=140, seed=2)]
    for decode_from in (None, 40):
        freed = TeacherForcedScorer(engine()).compute_logits(ids, decode_from=decode_from)
        whole = TeacherForcedScorer(engine(frees=False)).compute_logits(
            ids, decode_from=decode_from
        )
        assert all(torch.equal(a, b) for a, b in zip(freed, whole, strict=True))


@pytest.mark.parametrize("options", [{"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3}])
def test_forks_and_beams(options: dict[str, Any]) -> None:
    prompts = tiny.prompts(2, low=60, high=90, seed=7)
    requests = tiny.requests(prompts, tiny.params(max_tokens=50, ignore_eos=True, **options))
    outputs, most = run_counting_pages(engine(), requests)
    expected, unbounded = run_counting_pages(engine(frees=False), requests)
    assert outputs == expected
    assert most < unbounded


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_sequences_answer_the_same(overlap: bool) -> None:
    """Pages for the windows of two sequences, of which six start with one page each."""
    prompts = tiny.prompts(6, low=5, high=8, seed=4)
    requests = tiny.requests(prompts, tiny.params(max_tokens=90, ignore_eos=True))
    small = engine(pages=max_sequence_pages(512, PAGE, 20, 24) + 1, overlap=overlap)
    small.scheduler.limits = replace(small.scheduler.limits, reserve_until_finish=False)
    outputs, _ = run_counting_pages(small, requests)
    assert outputs == run_counting_pages(engine(frees=False), requests)[0]
    assert small.stats().preemptions > 0


def test_all_pages_come_back() -> None:
    core = engine(enable_prefix_caching=False)
    run_counting_pages(core, long_requests(4))
    assert core.scheduler.pool.num_available == core.scheduler.pool.count
    assert not any(core.scheduler.pool.refs)


def cached_tokens(core: EngineCore, request: Request) -> tuple[int, list[int]]:
    """Tokens of the prompt that were cached, and the answer."""
    core.add(request)
    events = tiny.drain(core)
    return events[-1].cached_tokens, [e.token_id for e in events if e.token_id is not None]


def test_a_cached_prefix_needs_the_pages_of_the_window_only() -> None:
    core = engine()
    prompt = tiny.prompts(1, low=120, high=120, seed=3)[0]
    first = tiny.requests([prompt], tiny.params(max_tokens=20))[0]
    assert cached_tokens(core, first)[0] == 0
    pool = core.scheduler.pool
    keys = core.input_processor.prompt_page_keys(prompt, "", PAGE)
    for key in keys[:11]:  # of 14 pages in front of the last token 3 are left: 24 tokens
        page = pool.cached_page_for_key(key)
        assert page is not None
        pool._drop_cache_key(page)
    longer = tiny.requests([(*prompt, 5, 6, 7)], tiny.params(max_tokens=20))[0]
    cached, answer = cached_tokens(core, longer)
    assert cached == 120 // PAGE * PAGE
    assert answer == cached_tokens(engine(frees=False), longer)[1]


def test_a_prefix_with_a_gap_in_its_window_is_not_a_hit() -> None:
    core = engine()
    prompt = tiny.prompts(1, low=121, high=121, seed=3)[0]
    request = tiny.requests([prompt], tiny.params(max_tokens=20))[0]
    cached_tokens(core, request)
    pool = core.scheduler.pool
    keys = core.input_processor.prompt_page_keys(prompt, "", PAGE)
    missing = pool.cached_page_for_key(keys[13])
    assert missing is not None
    pool._drop_cache_key(missing)
    cached, answer = cached_tokens(core, request)
    assert cached == 13 * PAGE  # the page behind the gap is not used
    assert answer == cached_tokens(engine(frees=False), request)[1]


def test_layers_without_a_window_keep_all_pages() -> None:
    made = tiny.decoder()
    assert made.kv.window is None
    config = replace(made.config, windows=(20, None))
    assert Decoder(config).kv.window is None


def test_pages_in_use() -> None:
    assert max_sequence_pages(1000, 10, None, 64) == 100
    assert max_sequence_pages(1000, 10, 30, 64) == 11
    assert max_sequence_pages(25, 10, 30, 64) == 3
    groups = 10, (None, 30), 64
    assert max_sequence_pages_in_groups(1000, *groups) == 111
    assert [max_fitting_length(1000, *groups, pages) for pages in (111, 110, 13, 2, 1, -1)] == [
        1000, 990, 60, 10, 0, 0,
    ]  # fmt: skip
    assert [first_page_in_use(n, 10, 15) for n in (0, 14, 24, 25, 60)] == [0, 0, 1, 1, 4]
    assert first_page_in_use(60, 10, None) == 0
    assert first_page_in_use(60, 10, 1) == 5

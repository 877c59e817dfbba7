"""Peak pages, and a scheduler that preempts no sequence if output lengths are known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduler_simulation import iter_steps
from modelmill.core.types import Request
from modelmill.runtime.admission import (
    ends_only_at_length_limit,
    have_similar_output_limits,
    predict_peak_pages,
)
from modelmill.runtime.kv_pages import PagePool
from modelmill.runtime.scheduler import Scheduler, SchedulerLimits
from modelmill.runtime.sequence import RopeFrequencyRule, Sequence
from tests.runtime import tiny

RULE = RopeFrequencyRule("fixed", lambda _: 0)


def sequence(prompt: int, answer: int, arrival: int = 0, **params: Any) -> Sequence:
    sampling = tiny.params(**({"max_tokens": answer, "ignore_eos": True} | params))
    request = Request(id=str(arrival), prompt=(5,) * prompt, params=sampling, eos_ids=(2,))
    return Sequence(request, 0, arrival, RULE, max_length=prompt + answer)


def pages_at(works: list[tuple[int, int]], size: int, step: int) -> int:
    """Pages after so many steps, of those that have not ended."""
    return sum(-(-(prompt + step) // size) for prompt, answer in works if answer >= step)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 100)), min_size=1, max_size=30),
    st.sampled_from([1, 16]),
)
def test_the_worst_moment_is_found(works: list[tuple[int, int]], size: int) -> None:
    exact = max(
        pages_at(works, size, step) for step in range(1 + max(answer for _, answer in works))
    )
    estimate = predict_peak_pages([sequence(*work) for work in works], size)
    # last pages count as half full: off by half a page each at most, and by one for rounding
    assert abs(estimate - exact) <= len(works) / 2 + 2


def test_answers_that_may_end_are_taken_as_they_are() -> None:
    known, unknown = sequence(33, 400), sequence(33, 400, ignore_eos=False)
    assert ends_only_at_length_limit(known)
    assert not ends_only_at_length_limit(unknown)
    assert not ends_only_at_length_limit(sequence(33, 400, stop=("x",)))
    assert not ends_only_at_length_limit(sequence(33, 400, stop_token_ids=(9,)))
    assert predict_peak_pages([unknown], 16) == 0, "nothing is known"
    assert predict_peak_pages([unknown, known], 16) == predict_peak_pages([known], 16) + 3
    assert predict_peak_pages([known], 16) > 25
    assert predict_peak_pages([], 16) == 0


def serve(scheduler: Scheduler, works: list[tuple[int, int]], **params: Any) -> tuple[int, int]:
    """Steps until all have ended, each after its limit, and the most that ran at once."""
    for number, work in enumerate(works):
        scheduler.add(sequence(*work, number, **params))
    steps, most = 0, 0
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.work, "a step of nothing"
        scheduler.update_after_launch(plan)
        steps, most = steps + 1, max(most, len(scheduler.running))
        for seq, _ in plan.work:
            if seq.pending:
                seq.tokens.append(7)
                seq.pending = 0
                if seq.length >= seq.max_length:
                    scheduler.remove(seq)
    return steps, most


@pytest.mark.parametrize("seed", range(6))
def test_no_sequence_is_preempted_where_it_is_known_when_answers_end(seed: int) -> None:
    draw = random.Random(seed)
    works = [(draw.randrange(1, 300), draw.randrange(20, 200)) for _ in range(60)]
    limits, pages = SchedulerLimits(1024, 64, 16, prefix_caching=False, max_mixed_tokens=256), 160
    known, unknown = (Scheduler(limits, PagePool(pages), 32) for _ in range(2))
    steps, most = serve(known, works)
    more, _ = serve(unknown, works, ignore_eos=False)
    assert known.preemptions == 0
    assert unknown.preemptions > 0, "the pool is too large for this test"
    assert most > 8
    assert steps <= 1.1 * more
    assert known.pool.num_available == pages


@pytest.mark.parametrize("reads", [False, True], ids=["offline", "served"])
def test_a_request_does_not_wait_for_the_long_answers_of_others(reads: bool) -> None:
    """Pages are there now; that they will run out one day is no reason to wait until an answer of
    400 tokens ends.
    """
    scheduler = Scheduler(SchedulerLimits(1024, 64, 16, prefix_caching=False), PagePool(30), 40)
    if reads:
        scheduler.optimize_inter_token_latency(None, on_gpu=False)
    scheduler.add(sequence(16, 440, 0))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update_after_launch(plan)
    plan.work[0][0].tokens.append(7)
    plan.work[0][0].pending = 0
    late = sequence(100, 300, 1)
    scheduler.add(late)
    plan = scheduler.schedule()
    assert plan is not None
    assert (late in [seq for seq, _ in plan.work]) == reads


def test_answers_are_alike_by_their_limits_whatever_their_prompts() -> None:
    assert have_similar_output_limits([])
    assert have_similar_output_limits([sequence(10, 90), sequence(4000, 120), sequence(1, 100)])
    assert not have_similar_output_limits([sequence(10, 90), sequence(10, 121)])
    assert have_similar_output_limits([sequence(10, 0), sequence(10, 1)]), (
        "no answer at all, and one token"
    )


def steps_of(
    works: list[tuple[int, int]], *, together: bool, seqs: int = 64, pages: int = 1000
) -> list[list[int]]:
    """Tokens of each sequence in each step."""
    limits = SchedulerLimits(
        1024, seqs, 16, prefix_caching=False, max_mixed_tokens=256, prefill_all_first=together
    )
    scheduler = Scheduler(limits, PagePool(pages), 80)
    for number, work in enumerate(works):
        scheduler.add(sequence(*work, number))
    return [[count for _, count in plan.work] for plan in iter_steps(scheduler)]


def test_prompts_of_answers_that_end_together_go_first() -> None:
    works = [(500, 40)] * 8
    assert [sum(step) for step in steps_of(works, together=True)[:4]] == [1024, 1024, 1024, 934 + 6]
    pieces = steps_of(works, together=False)
    assert sum(pieces[0]) == 1024
    assert {sum(step) for step in pieces[1:10]} == {256}


@pytest.mark.parametrize(
    ("works", "room"),
    [
        ([(500, 40)] * 4 + [(500, 80)] * 4, {}),
        ([(500, 40)] * 8, {"seqs": 6}),
        ([(500, 40)] * 8, {"pages": 200}),
    ],
    ids=["answers differ", "rows for six", "pages for six"],
)
def test_prompts_join_in_pieces_where_some_have_to_wait_or_answers_differ(
    works: list[tuple[int, int]], room: dict[str, int]
) -> None:
    assert steps_of(works, together=True, **room)[:8] == steps_of(works, together=False, **room)[:8]

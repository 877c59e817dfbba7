"""What joins a step beside running answers, and in which order requests are served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.types import FinishReason, Request
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.scheduler import CPU_MIN_CHUNK_TOKENS, MIN_CHUNK_TOKENS, Schedule
from tests.hypothesis_examples import examples
from tests.runtime import tiny


def plans(engine: EngineCore) -> list[list[int]]:
    """The tokens of each sequence in every step that is launched from now on."""
    counts: list[list[int]] = []
    run = engine.model_runner.launch_forward

    def run_and_record(plan: Schedule):
        counts.append([count for _, count in plan.work])
        return run(plan)

    engine.model_runner.launch_forward = run_and_record  # type: ignore[method-assign]
    return counts


def untimed(engine: EngineCore) -> list[tuple[int, int, bool]]:
    """Record (decodes, tokens, prefill_unlimited) of each step; chunks do not adapt to its time."""
    observed: list[tuple[int, int, bool]] = []

    def record(plan: Schedule, seconds: float) -> None:
        assert seconds > 0
        observed.append((plan.num_decodes, plan.num_tokens, plan.prefill_unlimited))

    engine.scheduler.observe_step = record  # type: ignore[method-assign]
    return observed


def of_length(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    """A request whose answer has exactly ``max_tokens``."""
    return Request(
        id=name, prompt=prompt, params=tiny.params(max_tokens=max_tokens, ignore_eos=True)
    )


def test_prompts_join_running_answers_in_pieces() -> None:
    engine = tiny.make_engine(
        tiny.decoder(max_len=512), max_mixed_tokens=10, max_num_batched_tokens=4096
    )
    steps = plans(engine)
    engine.add(of_length("a", (5, 6), 30))
    engine.step()
    assert steps == [[2]]
    long = tuple(range(5, 30)) * 8
    engine.add(of_length("b", long, 2))
    tiny.drain(engine)
    assert [1, MIN_CHUNK_TOKENS] in steps
    assert all(sum(counts) <= 1 + MIN_CHUNK_TOKENS for counts in steps)
    # nothing runs: the whole prompt is one chunk
    engine.add(Request(id="c", prompt=long[1:], params=tiny.params(max_tokens=1)))
    tiny.drain(engine)
    assert steps[-1] == [len(long) - 1]


@pytest.mark.parametrize(
    ("mixed", "most"),
    [
        (None, lambda rows: rows + max(rows, CPU_MIN_CHUNK_TOKENS)),
        (40, lambda rows: max(40, rows + CPU_MIN_CHUNK_TOKENS)),
    ],
    ids=["by the rows", "given"],
)
def test_answers_that_are_read_flow_on_a_cpu(mixed: int | None, most: Callable[[int], int]) -> None:
    """What came together starts together; later prompts join in pieces, at first larger ones where
    more answers run.
    """
    engine = tiny.make_engine(tiny.decoder(max_len=512), max_num_batched_tokens=4096)
    engine.scheduler.optimize_inter_token_latency(mixed, on_gpu=False)
    untimed(engine)
    steps = plans(engine)
    engine.add(of_length("first", tuple(range(5, 25)), 60))
    engine.step()
    for number in range(3):
        prompt = (6 + number, *range(5, 95), *range(5, 14))
        engine.add(of_length(f"with-{number}", prompt, 60))
    engine.step()
    assert steps == [[20], [1, 100, 100, 100]]
    for _ in range(4):
        engine.step()
    del steps[:]
    engine.add(of_length("late", tuple(range(5, 95)) * 2, 3))
    tiny.drain(engine)
    assert steps[0] == [1, 1, 1, 1, most(4) - 4]
    assert all(sum(counts) <= most(counts.count(1)) for counts in steps)


def step_beside_the_first(engine: EngineCore, count: int, repeats: int = 1) -> None:
    """A step with one prompt, then three with ``count`` longer ones beside it."""
    options = tiny.params(max_tokens=40, ignore_eos=True)
    engine.add(Request(id="first", prompt=tuple(range(5, 55)) * 3, params=options))
    engine.step()
    for number in range(count):
        prompt = (6 + number, *range(5, 90), *range(5, 70)) * repeats
        engine.add(Request(id=f"with-{number}", prompt=prompt, params=options))
    for _ in range(3):
        engine.step()


def test_a_step_lasts_no_longer_than_a_new_request_can_wait() -> None:
    """Once it is known how fast prompts go, here 200 tokens a second; who runs gets a token in each
    step.
    """
    engine = tiny.make_engine(tiny.decoder(max_len=512), max_num_batched_tokens=4096)
    engine.scheduler.optimize_inter_token_latency(None, on_gpu=False)
    timed = engine.scheduler.observe_step
    engine.scheduler.observe_step = lambda plan, _: timed(plan, plan.num_tokens / 200)  # type: ignore[method-assign]
    steps = plans(engine)
    step_beside_the_first(engine, 5)
    assert steps[0] == [150]
    assert steps[1:3] == [[1, 151, 49], [1, 1, 102, 98]]
    assert all(sum(counts) <= 200 + counts.count(1) for counts in steps)
    tiny.drain(engine)


def test_one_slow_step_does_not_make_all_that_follow_small() -> None:
    """The first was compiled for, or another process had the machine; true is 2,000 tokens a
    second.
    """
    engine = tiny.make_engine(tiny.decoder(max_len=512), max_num_batched_tokens=4096)
    engine.scheduler.optimize_inter_token_latency(None, on_gpu=False)
    timed, slow = engine.scheduler.observe_step, [5.0]
    engine.scheduler.observe_step = lambda plan, _: timed(
        plan, slow.pop() if slow else plan.num_tokens / 2000
    )  # type: ignore[method-assign]
    steps = plans(engine)
    step_beside_the_first(engine, 8, repeats=2)
    assert [sum(counts) for counts in steps[:2]] == [150, 1 + 128]
    assert sum(steps[2]) > 1500, "the second step was a sample of the prefill speed"
    tiny.drain(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_timed_with_what_was_in_them(ahead: bool) -> None:
    engine = tiny.make_engine(tiny.decoder(max_len=512), max_num_batched_tokens=4096, overlap=ahead)
    engine.scheduler.optimize_inter_token_latency(None, on_gpu=False)
    observed = untimed(engine)
    engine.add(of_length("first", tuple(range(5, 25)), 40))
    for _ in range(6):
        engine.step()
    assert observed[0] == (0, 20, True)
    assert set(observed[4:]) == {(1, 1, False)}
    del observed[:]
    engine.add(of_length("late", tuple(range(54, 4, -1)), 3))
    tiny.drain(engine)
    assert (1, 1 + CPU_MIN_CHUNK_TOKENS, False) in observed
    assert sum(tokens - rows for rows, tokens, _ in observed) == 50


def test_pieces_shrink_where_steps_with_them_take_long() -> None:
    engine = tiny.make_engine(
        tiny.decoder(max_len=512), max_num_batched_tokens=4096, max_num_seqs=24
    )
    engine.scheduler.optimize_inter_token_latency(None, on_gpu=False)
    pace = engine.scheduler.adaptive_chunk
    assert pace is not None
    options = tiny.params(max_tokens=150, ignore_eos=True)
    for number in range(20):
        engine.add(Request(id=str(number), prompt=(5, 6, 7 + number), params=options))
    timed = engine.scheduler.observe_step
    engine.scheduler.observe_step = lambda plan, _: timed(
        plan, 0.01 if plan.num_tokens == plan.num_decodes else 0.04
    )  # type: ignore[method-assign]
    for _ in range(30):
        engine.step()
    assert pace.next_chunk_tokens(20) == 20
    engine.add(of_length("late", tuple(range(5, 95)) * 5, 3))
    for _ in range(30):
        engine.step()
    assert pace.chunk_tokens == CPU_MIN_CHUNK_TOKENS


@settings(max_examples=examples(20, 8), deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**16))
def test_pieces_change_no_answer(mixed: int, seed: int) -> None:
    prompt_ids = tiny.prompts(6, 3, 40, seed=seed)
    todo = tiny.requests(prompt_ids, tiny.params(max_tokens=9))
    assert tiny.run(tiny.make_engine(max_mixed_tokens=mixed), todo) == tiny.run(
        tiny.make_engine(), todo
    )


def test_the_limit_is_not_for_the_steps_of_searches() -> None:
    engine = tiny.make_engine(max_mixed_tokens=1, max_num_seqs=200, max_num_batched_tokens=400)
    steps = plans(engine)
    options = tiny.params(num_beams=30, n=1, max_tokens=4, temperature=0.0)
    engine.add(of_length("single", (5, 9), 20))
    for number in range(6):
        engine.add(Request(id=f"beams-{number}", prompt=(5, 6, 7 + number), params=options))
    ended = {
        t.request_id: t.finish_reason for t in tiny.drain(engine) if t.finish_reason is not None
    }
    assert len(ended) == 7
    assert FinishReason.ABORT not in ended.values()
    assert any(len(counts) == 6 * 30 + 1 for counts in steps)
    tiny.assert_idle(engine)


def test_a_blank_step_reads_and_stores_nothing() -> None:
    engine = tiny.make_engine()
    before = [page.clone() for page in (*engine.model_runner.kv.k, *engine.model_runner.kv.v)]
    for query, seqs in ((16, 1), (64, 17)):
        logits = engine.model_runner.forward(engine.model_runner.packer.dummy_batch(query, seqs))
        assert logits.shape == (1, engine.vocab)
    assert all(
        bool((a == b).all())
        for a, b in zip(before, (*engine.model_runner.kv.k, *engine.model_runner.kv.v), strict=True)
    )


def test_when_a_request_left_the_queue_is_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """started_at is set at admission, before the step runs; waiting or preemption keeps it."""
    moments = iter(range(1000))
    monkeypatch.setattr("modelmill.runtime.scheduler.time.perf_counter", lambda: next(moments))
    engine = tiny.make_engine(tiny.decoder(), max_num_seqs=2, pages=6)
    # a token might end them (it never comes): where that cannot be, no more is admitted than will
    # fit
    params = tiny.params(
        max_tokens=30, ignore_eos=True, stop_token_ids=(96,), logit_bias={96: -100.0}
    )
    for request in tiny.requests(tiny.prompts(3, 8, 8), params):
        engine.add(request)
    leaders = [engine.output_processor.live_sequences[str(i)][0] for i in range(3)]
    start_times: list[list[float | None]] = []
    run = engine.model_runner.launch_forward

    def run_and_record(plan: Schedule):
        start_times.append([seq.started_at for seq in leaders])
        return run(plan)

    engine.model_runner.launch_forward = run_and_record  # type: ignore[method-assign]
    engine.clock = lambda: 0.0
    tiny.drain(engine)
    assert start_times[0] == [0, 1, None]
    assert start_times[-1] == [0, 1, 2]
    assert engine.stats().preemptions > 0


def test_a_postponed_schedule_takes_its_copies_on_write_back() -> None:
    """Siblings share a page; pages are short after the first of them has got its own."""
    request = Request(
        id="a",
        prompt=tuple(range(5, 17)),  # a page of 8 tokens and half of another
        params=tiny.params(max_tokens=6, n=3, temperature=1.0, seed=3, ignore_eos=True),
    )
    undisturbed = tiny.make_engine(tiny.decoder())
    undisturbed.add(request)
    expected = tiny.output_ids(tiny.drain(undisturbed))
    engine = tiny.make_engine(tiny.decoder())
    engine.add(request)
    events = engine.step()
    scheduler = engine.scheduler
    before = [list(seq.pages) for seq in scheduler.running]
    assert len(before) == 3
    assert before[0] == before[1] == before[2]
    free = scheduler.pool.num_available
    remaining = [True, False]
    alloc_page = scheduler.pool.alloc_page
    scheduler.pool.alloc_page = lambda *_: alloc_page() if remaining.pop(0) else None  # type: ignore[method-assign]
    assert scheduler.schedule(overlapped=True) is None
    assert remaining == []
    scheduler.pool.alloc_page = alloc_page  # type: ignore[method-assign]
    assert [list(seq.pages) for seq in scheduler.running] == before
    assert scheduler.pool.num_available == free
    rows = [scheduler.tables.table[seq.table_row, 1].item() for seq in scheduler.running]
    assert rows == [pages[1] for pages in before]
    assert tiny.output_ids([*events, *tiny.drain(engine)]) == expected

"""Recurrent state of sequences: slots, snapshots in the prefix cache, forks, preemption."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.core.errors import CapacityError
from modelmill.nn.recurrent_state import ModelStateSpec, RecurrentStateCache, StateSpec
from modelmill.ops.cuda_graph import NotCapturable
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.model_runner import ModelRunner
from modelmill.runtime.state_snapshots import StateSnapshotCache
from tests.runtime import tiny

PAGE = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.hybrid()


def drawn(count: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, tiny.VOCAB, (count,), generator=draw).tolist())


def answer(engine: EngineCore, prompt: tuple[int, ...], count: int = 13) -> tuple[Any, int]:
    """(ids and their log-probabilities, cached tokens)."""
    params = tiny.params(max_tokens=count, logprobs=2, ignore_eos=True)
    engine.add(tiny.requests([prompt], params, eos=())[0])
    events = [event for event in tiny.drain(engine) if event.token_id is not None]
    tiny.assert_idle(engine)
    return [(event.token_id, event.logprobs) for event in events], events[-1].cached_tokens


def test_a_shared_prefix_is_restored_bit_for_bit(model: Any) -> None:
    """Log-probabilities equal those of a cold engine, one token a step in both."""
    warm = tiny.make_engine(model, max_num_batched_tokens=1)
    prefix = drawn(40)
    answer(warm, prefix, 1)
    for extra in (1, 9):
        prompt = prefix + drawn(extra, seed=extra)
        cold = tiny.make_engine(model, max_num_batched_tokens=1, enable_prefix_caching=False)
        expected, none = answer(cold, prompt)
        actual, cached = answer(warm, prompt)
        assert actual == expected
        assert (none, cached >= 32) == (0, True)


def test_the_tenth_turn_computes_at_most_a_page_again(model: Any) -> None:
    """Of the conversation so far; log-probabilities are those of a cold engine bit for bit.

    One token a step in both: a product of many rows rounds differently than one of a row.
    """
    options: dict[str, Any] = {"max_num_batched_tokens": 1, "max_num_seqs": 4}
    warm = tiny.make_engine(model, **options)
    cold = tiny.make_engine(model, **options, enable_prefix_caching=False)
    prompt: tuple[int, ...] = ()
    history = 0
    for turn in range(10):
        prompt += drawn(2 + turn % 3, seed=turn)
        actual, cached = answer(warm, prompt, 4)
        expected, _ = answer(cold, prompt, 4)
        assert actual == expected, turn
        # the last sampled token of an answer has not been computed
        assert cached > history - 1 - PAGE, turn
        prompt += tuple(token for token, _ in actual)
        history = len(prompt)


def test_a_conversation_in_whole_steps_gives_the_same_tokens(model: Any) -> None:
    warm = tiny.make_engine(model)
    prompt: tuple[int, ...] = ()
    for turn in range(4):
        prompt += drawn(11, seed=turn)
        actual, _ = answer(warm, prompt)
        expected, _ = answer(tiny.make_engine(model), prompt)
        assert [token for token, _ in actual] == [token for token, _ in expected]
        prompt += tuple(token for token, _ in actual)


def test_the_third_request_finds_where_two_prompts_part(model: Any) -> None:
    """Pages are cached further than snapshots: one is kept where they end."""
    engine = tiny.make_engine(model)
    prefix = drawn(40)
    cached = [answer(engine, prefix + drawn(30, seed=i), 2)[1] for i in range(4)]
    assert cached == [0, 0, 40, 40]


def test_batches_and_mixed_steps_compute_what_single_ones_do(model: Any) -> None:
    prompts = tiny.prompts(9)
    expected = tiny.run_one_by_one(
        tiny.make_engine(model, enable_prefix_caching=False), tiny.requests(prompts)
    )
    together = tiny.make_engine(model, max_mixed_tokens=12, max_num_batched_tokens=24)
    assert tiny.run(together, tiny.requests(prompts)) == expected
    assert tiny.run(together, tiny.requests(prompts)) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_go_on_as_before(model: Any, caching: bool) -> None:
    prompts = [drawn(count, seed=count) for count in (40, 33, 25, 17)]
    params = tiny.params(max_tokens=20)
    expected = tiny.run(tiny.make_engine(model), tiny.requests(prompts, params))
    small = tiny.make_engine(model, pages=10, max_model_len=64, enable_prefix_caching=caching)
    assert tiny.run(small, tiny.requests(prompts, params)) == expected
    assert small.stats().preemptions > 0
    assert (small.scheduler.states.restored > 0) == caching  # type: ignore[union-attr]


def test_forks_and_beams_copy_the_state(model: Any) -> None:
    prompt = drawn(19)
    params = tiny.params(n=3, temperature=1.0, seed=7, max_tokens=20)
    forked = tiny.run(tiny.make_engine(model), tiny.requests([prompt], params))
    # with one row, no sibling forks: each computes the prompt itself
    single = tiny.make_engine(model, max_num_seqs=1, enable_prefix_caching=False)
    assert tiny.run(single, tiny.requests([prompt], params)) == forked
    beams = tiny.params(num_beams=3, max_tokens=8)
    results = tiny.run(tiny.make_engine(model), tiny.requests([prompt], beams))
    (ids,) = results.values()
    scores = [score_of(model, prompt, other) for other in (ids, drawn(len(ids), 3))]
    assert scores[0] > scores[1]


def test_parts_end_at_pages_but_not_those_of_beams(model: Any) -> None:
    """The last tokens of all beams must run in one step, whatever pages they fill."""
    scheduler = tiny.make_engine(model).scheduler
    for computed, num_uncomputed, count, expected in (
        (0, 30, 20, 16), (16, 30, 8, 8), (16, 6, 6, 6), (16, 30, 5, 8), (20, 2, 1, 2),
    ):  # fmt: skip
        seq: Any = SimpleNamespace(
            computed=computed, num_uncomputed=num_uncomputed, branch_end=0, beam_search=None
        )
        assert scheduler._clip_to_page_boundary(seq, count, {}) == expected
        seq.beam_search = seq
        assert scheduler._clip_to_page_boundary(seq, count, {}) == count


def score_of(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> float:
    """The log-probability of an answer, computed as a prompt."""
    engine = tiny.make_engine(model)
    params = tiny.params(max_tokens=1, prompt_logprobs=0)
    engine.add(tiny.requests([prompt + ids], params)[0])
    rows = next(e.prompt_logprobs for e in tiny.drain(engine) if e.prompt_logprobs)
    chosen = zip(rows[len(prompt) :], ids, strict=True)
    return sum(row[token].logprob for row, token in chosen)  # type: ignore[index]


def test_a_step_out_of_memory_is_computed_again_from_the_prompt(model: Any) -> None:
    """Some layers may have advanced their states before the step failed."""
    requests = tiny.requests([drawn(30), drawn(20, 1)])
    expected = tiny.run(tiny.make_engine(model), requests)
    engine = tiny.make_engine(model, enable_prefix_caching=False)
    real, calls = ModelRunner.launch_forward, [0]

    def run(self: ModelRunner, schedule: Any) -> Any:
        forward = real(self, schedule)
        calls[0] += 1
        if calls[0] == 5:
            raise MemoryError
        return forward

    with mock.patch.object(ModelRunner, "launch_forward", run):
        assert tiny.run(engine, requests) == expected
    assert engine.stats().preemptions == 2


def test_snapshots_stay_within_their_budget_and_are_evicted(model: Any) -> None:
    size = model.state.slot_bytes(torch.float32)
    engine = tiny.make_engine(model, max_num_seqs=2, state_cache_bytes=5 * size)
    states = engine.scheduler.states
    assert states is not None
    assert (engine.config.max_num_seqs, states.count) == (2, 2)
    assert engine.model_runner.states.nbytes == 5 * size  # type: ignore[union-attr]
    first = drawn(20)
    for seed in range(5):
        answer(engine, drawn(20, seed=seed), 10)
    assert states.num_cached == states.count == 2
    assert answer(engine, first, 2)[1] == 0  # evicted
    before = engine.stats()
    assert answer(engine, first, 2)[1] == 16
    stats = engine.stats()
    assert (stats.state_bytes, stats.snapshots, stats.snapshot_slots) == (5 * size, 2, 2)
    assert stats.restored_states == before.restored_states + 1


def test_fewer_sequences_run_where_states_do_not_fit(model: Any) -> None:
    size = model.state.slot_bytes(torch.float32)
    engine = tiny.make_engine(model, state_cache_bytes=4 * size, enable_prefix_caching=False)
    assert engine.config.max_num_seqs == 3
    prompts = [drawn(10, seed=i) for i in range(5)]
    expected = tiny.run(tiny.make_engine(model), tiny.requests(prompts))
    assert tiny.run(engine, tiny.requests(prompts)) == expected
    with pytest.raises(CapacityError, match=r"^the recurrent state of one sequence needs .*bytes$"):
        tiny.make_engine(model, state_cache_bytes=size)


def test_a_model_without_attention_keeps_no_keys() -> None:
    model = tiny.hybrid(layers=2, recurrent=(0, 1))
    assert model.kv.page_bytes(PAGE, torch.float32) == 0
    engine = tiny.make_engine(model)
    prompt = drawn(40)
    expected, _ = answer(engine, prompt)
    actual, cached = answer(engine, prompt)
    assert (actual, cached) == (expected, 32)


def test_slots_of_a_cache_are_copied_whole() -> None:
    shape = ModelStateSpec((StateSpec("a", (3, 5)), StateSpec("b", (2,), torch.float32)))
    assert shape.slot_bytes(torch.bfloat16) == 128  # each state starts at 64 bytes
    cache = RecurrentStateCache.allocate(shape, 3, torch.bfloat16, "cpu")
    assert [tuple(state.shape) for state in cache.states] == [(3, 3, 5), (3, 2)]
    cache.states[0][1], cache.states[1][1] = 2, 3
    cache.copy_slots([(1, 2), (0, 1)])
    assert [state[2].unique().tolist() for state in cache.states] == [[2], [3]]
    assert [state[1].unique().tolist() for state in cache.states] == [[0], [0]]
    with cache.restore_slots_on_exit(torch.tensor([2])):
        cache.states[0][2] = 9
    assert cache.states[0][2].unique().tolist() == [2]
    # a step that cannot be captured is run again, without a graph

    def fail() -> None:
        cache.states[0][2] = 9
        raise NotCapturable

    with pytest.raises(NotCapturable), cache.restore_slots_on_exit(torch.tensor([2])):
        fail()
    assert cache.states[0][2].unique().tolist() == [2]


def test_copies_into_a_released_slot_are_dropped() -> None:
    states = StateSnapshotCache(2, 1, PAGE)
    states.queue_state_copy(0, 1)
    states.queue_state_copy(1, 0)
    states.drop_state_copies_into(1)
    assert states.pop_copies() == [(1, 0)]
    assert states.pop_copies() == []


def test_a_restored_state_waits_for_the_step_that_needs_it(model: Any) -> None:
    """A schedule without work is not launched: its copies are made before the next one."""
    engine = tiny.make_engine(model, max_num_batched_tokens=16)
    prompt = drawn(40)
    expected, _ = answer(engine, prompt)
    scheduler = engine.scheduler
    engine.add(tiny.requests([prompt], tiny.params(max_tokens=13, ignore_eos=True), eos=())[0])
    with mock.patch.object(scheduler, "_clip_to_page_boundary", return_value=0):
        schedule = scheduler.schedule()
    assert schedule is not None
    assert (schedule.work, schedule.state_copies) == ([], [])
    assert scheduler.running[0].computed == 32
    ids = [event.token_id for event in tiny.drain(engine)]
    assert ids == [token for token, _ in expected]

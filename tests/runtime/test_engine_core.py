"""The same answers whichever way the work is cut, and nothing left behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError, RequestError
from modelmill.core.types import FinishReason, Request, SamplingParams
from modelmill.loader.capacity import weight_bytes
from modelmill.nn.kv import KVCache
from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.ops.registry import select_backends
from modelmill.runtime.chunked_prefill import default_max_mixed_tokens
from modelmill.runtime.engine_core import scheduler_limits
from modelmill.runtime.scheduler import SchedulerLimits
from modelmill.weights import base
from tests.hypothesis_examples import examples
from tests.runtime import tiny

MODEL_KINDS = [("fixed", None), ("prompt", None), ("running", None), ("fixed", 12)]


def unbatched_logits(model, ids: list[int], prompt: int) -> torch.Tensor:
    """Logits of one sequence in a single step on its own pages, in order: no scheduler, no
    packer.
    """
    n = len(ids)
    kv = KVCache.allocate(model.kv, -(-n // 8), 8, torch.float32, "cpu")
    rule = model.rope_length_source
    deciding = [prompt if rule == "prompt" or p < prompt else p + 1 for p in range(n)]
    step = Step(
        ids=torch.tensor(ids),
        positions=torch.arange(n),
        slots=torch.arange(n),
        rope_frequency_ids=torch.tensor([model.rope_frequency_id(x) for x in deciding]),
        block_tables=torch.arange(-(-n // 8), dtype=torch.int32)[None],
        query_start=torch.tensor([0, n], dtype=torch.int32),
        context_lens=torch.tensor([n], dtype=torch.int32),
        logit_rows=None,
        max_query=n,
        max_context=n,
        kv=kv,
        ops=select_backends(
            "cpu", dict.fromkeys(("linear", "paged_attention", "rope_cache"), "torch")
        ),
    )
    with torch.inference_mode():
        return model(step)


@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_equal_however_it_is_cut(rope_length_source: str, window: int | None) -> None:
    model = tiny.decoder(rope_length_source, window)
    todo = tiny.requests(tiny.prompts(9, 1, 60), tiny.params(max_tokens=20))
    expected = tiny.run_one_by_one(tiny.make_engine(model, enable_prefix_caching=False), todo)
    assert len(set(expected.values())) > 5
    together = tiny.make_engine(model)
    assert tiny.run(together, todo) == expected
    assert tiny.run(together, todo) == expected, "prefix cache warm"
    assert together.stats().cached_tokens > 0
    assert tiny.run(tiny.make_engine(model, max_num_batched_tokens=7), todo) == expected, "chunked"
    small = tiny.make_engine(model, pages=12)
    assert tiny.run(small, todo) == expected, "preempted"
    # pages behind the window are freed, and those inside it are enough
    assert (small.stats().preemptions > 0) == (window is None)
    assert tiny.run(tiny.make_engine(model, overlap=True), todo) == expected, "launched ahead"
    assert tiny.run(tiny.make_engine(model, pages=12, overlap=True), todo) == expected, (
        "ahead and preempted"
    )


@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_greedy_is_the_argmax_of_one_whole_pass(
    rope_length_source: str, window: int | None
) -> None:
    model = tiny.decoder(rope_length_source, window)
    for prompt in tiny.prompts(4, 5, 45, seed=3):
        request = tiny.requests([prompt], tiny.params(max_tokens=15, ignore_eos=True))
        answer = tiny.run(tiny.make_engine(model, max_num_batched_tokens=11), request)["0", 0]
        logits = unbatched_logits(model, [*prompt, *answer], len(prompt))
        if window is None and rope_length_source != "running":
            assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == answer


def test_running_rule_rotates_a_late_token_by_its_own_position() -> None:
    model = tiny.decoder("running")
    engine = tiny.make_engine(model)
    ids = list(tiny.prompts(1, 30, 30)[0])
    logits = TeacherForcedScorer(engine).compute_logits([ids], decode_from=10)[0]
    assert torch.allclose(logits, unbatched_logits(model, ids, 10), atol=1e-4)
    assert not torch.allclose(
        TeacherForcedScorer(engine).compute_logits([ids])[0], logits, atol=1e-2
    )
    tiny.assert_idle(engine)


@pytest.mark.parametrize("rope_length_source", ["fixed", "prompt", "running"])
def test_score_equals_one_whole_pass(rope_length_source: str) -> None:
    model = tiny.decoder(rope_length_source)
    lists = [list(p) for p in tiny.prompts(5, 20, 60, seed=5)]
    engine = tiny.make_engine(model, max_num_batched_tokens=16)
    for start in (None, 18):
        for ids, logits in zip(lists, TeacherForcedScorer(engine).compute_logits(lists, start)):
            assert torch.allclose(
                logits, unbatched_logits(model, ids, start or len(ids)), atol=1e-4
            )
    few = tiny.make_engine(model, pages=9)
    for ids, logits in zip(
        lists, TeacherForcedScorer(few).compute_logits([i[:60] for i in lists], 18)
    ):
        assert torch.allclose(logits, unbatched_logits(model, ids, 18), atol=1e-4)
    tiny.assert_idle(few)
    runs: list[tuple[int, int, int]] = []
    TeacherForcedScorer(engine).run_sequences(
        lists, None, lambda w, f, x: runs.append((w, f, len(x))), lambda w, p: p % 10 == 9
    )
    assert {(w, f) for w, f, _ in runs} == {
        (w, p) for w, ids in enumerate(lists) for p in range(9, len(ids), 10)
    }
    with pytest.raises(CapacityError, match="between 1 and 128 tokens here, not 200"):
        TeacherForcedScorer(engine).compute_logits([[5] * 200])
    tiny.assert_idle(engine)


def test_different_prompt_lengths_do_not_share_pages_under_ntk() -> None:
    engine = tiny.make_engine(tiny.decoder("prompt"))
    start = tiny.prompts(1, 16, 16)[0]
    tiny.run(engine, tiny.requests([start + (5,) * 5]))
    before = engine.stats().cached_tokens
    tiny.run(engine, tiny.requests([start + (5,) * 30]))
    assert engine.stats().cached_tokens == before
    tiny.run(engine, tiny.requests([start + (6,) * 30]))
    assert engine.stats().cached_tokens == before + 16


def test_salt_and_inserts_keep_prefixes_apart() -> None:
    engine = tiny.make_engine()
    prompt = tiny.prompts(1, 40, 40)[0]
    for salt, hit in (("", 0), ("a", 0), ("a", 32), ("b", 0), ("", 32)):
        engine.add(Request(id="x", prompt=prompt, params=tiny.params(), cache_salt=salt))
        assert tiny.drain(engine)[-1].cached_tokens == hit


def test_all_full_pages_of_an_answer_are_found_by_what_goes_on_after_it() -> None:
    """Pages of 16 tokens: the prompt ends amid the third, which is cached once it is full."""
    engine = tiny.make_engine()
    prompt = tiny.prompts(1, 40, 40)[0]
    engine.add(Request(id="a", prompt=prompt, params=tiny.params(max_tokens=30, ignore_eos=True)))
    answer = tiny.output_ids(tiny.drain(engine))["a", 0]
    engine.add(Request(id="b", prompt=(*prompt, *answer), params=tiny.params(max_tokens=1)))
    assert tiny.drain(engine)[-1].cached_tokens == 64


@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_sampling_is_the_same_alone_and_in_a_batch(overlap: bool) -> None:
    model = tiny.decoder()
    params_list = [
        tiny.params(temperature=1.0, seed=7, max_tokens=15),
        tiny.params(temperature=0.7, seed=8, top_k=5, max_tokens=15),
        tiny.params(temperature=1.3, seed=9, top_p=0.8, max_tokens=15),
        tiny.params(temperature=1.0, seed=10, min_p=0.1, repetition_penalty=1.3, max_tokens=15),
        tiny.params(temperature=1.0, seed=7, n=3, presence_penalty=0.5, max_tokens=15),
        tiny.params(frequency_penalty=1.5, max_tokens=15),
        tiny.params(temperature=2.0, max_tokens=5, logit_bias={5: 3.0}, seed=-3),
    ]
    prompts = tiny.prompts(len(params_list), 3, 30)
    todo = [
        Request(id=str(i), prompt=p, params=h, eos_ids=(1,))
        for i, (p, h) in enumerate(zip(prompts, params_list))
    ]
    expected = tiny.run_one_by_one(tiny.make_engine(model), todo)
    assert tiny.run(tiny.make_engine(model, overlap=overlap), todo) == expected
    small = tiny.make_engine(model, pages=9, max_num_batched_tokens=9, overlap=overlap)
    assert tiny.run(small, todo) == expected
    assert small.stats().preemptions > 0
    assert len({expected["4", i] for i in range(3)}) == 3


def test_unseeded_requests_differ_and_follow_the_run_seed() -> None:
    options = tiny.params(temperature=1.5, max_tokens=12)
    todo = tiny.requests([(5, 6, 7)] * 4, options)
    first = tiny.run(tiny.make_engine(seed=1), todo)
    assert len(set(first.values())) == 4
    assert tiny.run(tiny.make_engine(seed=1), todo) == first
    assert tiny.run(tiny.make_engine(seed=2), todo) != first


def test_n_forks_share_the_prompt_and_more_than_the_rows_wait() -> None:
    prompt = tiny.prompts(1, 30, 30)[0]
    params = tiny.params(temperature=1.0, seed=3, n=7, max_tokens=20, ignore_eos=True)
    request = tiny.requests([prompt], params)
    expected = tiny.run(tiny.make_engine(), request)
    assert len(expected) == 7
    for options in (
        {"max_num_seqs": 3},
        {"pages": 10},
        {"overlap": True},
        {"pages": 7, "overlap": True},
    ):
        assert tiny.run(tiny.make_engine(**options), request) == expected, options


def test_stops_and_limits() -> None:
    model = tiny.decoder()
    prompt = tiny.prompts(1, 10, 10)[0]
    free = tiny.run(
        tiny.make_engine(model),
        tiny.requests([prompt], tiny.params(ignore_eos=True, max_tokens=10)),
    )["0", 0]
    at = next(i for i in range(2, 10) if free[i] not in free[:i])
    stop = free[at]
    for overlap in (False, True):
        engine = tiny.make_engine(model, overlap=overlap)
        for options, eos in ((tiny.params(), (stop,)), (tiny.params(stop_token_ids=(stop,)), ())):
            engine.add(Request(id="x", prompt=prompt, params=options, eos_ids=eos))
            events = tiny.drain(engine)
            assert tuple(e.token_id for e in events) == (*free[:at], None)
            assert (events[-1].finish_reason, events[-1].stop_token_id) == (FinishReason.STOP, stop)
        engine.add(
            Request(id="x", prompt=prompt, params=tiny.params(min_tokens=8), eos_ids=(stop,))
        )
        events = tiny.drain(engine)
        assert stop not in [e.token_id for e in events[:8]]
        assert len(events) >= 8
        engine.add(
            Request(id="x", prompt=prompt, params=tiny.params(max_tokens=None, ignore_eos=True))
        )
        events = tiny.drain(engine)
        assert len(events) == engine.max_model_len - 10
        assert events[-1].finish_reason == FinishReason.LENGTH
        assert events[-1].token_id is not None
        tiny.assert_idle(engine)


def test_no_tokens_asked() -> None:
    engine = tiny.make_engine()
    prompt = tiny.prompts(1, 128, 128)[0]
    engine.add(
        Request(id="x", prompt=prompt, params=tiny.params(max_tokens=0, prompt_logprobs=1, n=2))
    )
    events = tiny.drain(engine)
    assert [e.finish_reason for e in events] == [FinishReason.LENGTH] * 2
    assert all(e.token_id is None for e in events)
    assert len(events[0].prompt_logprobs) == 128
    tiny.assert_idle(engine)


def test_what_can_never_be_served_is_refused() -> None:
    engine = tiny.make_engine(pages=16, max_model_len=100)
    bad = [
        ((), tiny.params(), "empty"),
        ((3, tiny.VOCAB), tiny.params(), "token ids must be between"),
        ((-1,), tiny.params(), "token ids must be between"),
        ((3,) * 100, tiny.params(), "shorten"),
        ((3,) * 101, tiny.params(max_tokens=0), "shorten"),
        ((3,), tiny.params(num_beams=17), "num_beams=17"),
        ((3,), tiny.params(logit_bias={tiny.VOCAB: 1.0}), "logit_bias"),
    ]
    for prompt, options, match in bad:
        with pytest.raises(RequestError, match=match):
            engine.add(Request(id="x", prompt=prompt, params=options))
    engine.add(Request(id="x", prompt=(3,) * 99, params=tiny.params()))
    with pytest.raises(RequestError, match="already running"):
        engine.add(Request(id="x", prompt=(3,), params=tiny.params()))
    assert len(tiny.drain(engine)) == 1
    tiny.assert_idle(engine)


def test_alone_in_an_exhausted_pool_ends_with_length() -> None:
    engine = tiny.make_engine(pages=16)
    # the pool shrinks under the loop, as if others held it
    pages = [engine.scheduler.pool.alloc_page() for _ in range(12)]
    for overlap in (False, True):
        engine._overlap = overlap
        engine.add(
            Request(id="x", prompt=(3,) * 20, params=tiny.params(max_tokens=100, ignore_eos=True))
        )
        events = tiny.drain(engine)
        assert events[-1].finish_reason == FinishReason.LENGTH
        assert len([e for e in events if e.token_id is not None]) == 32 - 20 + 1
    for page in pages:
        engine.scheduler.pool.decref(page)
    tiny.assert_idle(engine)


def test_abort_and_finish_give_everything_back() -> None:
    for overlap in (False, True):
        engine = tiny.make_engine(overlap=overlap, max_num_batched_tokens=16)
        for request in tiny.requests(
            tiny.prompts(6, 10, 40), tiny.params(max_tokens=60, ignore_eos=True, n=2)
        ):
            engine.add(request)
        for _ in range(12):
            engine.step()
        engine.finish_on_stop_string("0", 0)
        engine.abort("1")
        engine.abort("5")
        engine.abort("unknown")
        events = tiny.drain(engine)
        ended = tiny.finish_reasons(events)
        assert ended["1", 0] == ended["1", 1] == ended["5", 0] == FinishReason.ABORT
        assert ("0", 0) not in ended
        assert ended["0", 1] == FinishReason.LENGTH
        assert not [e for e in events if e.request_id in ("1", "5") and e.token_id is not None]
        tiny.assert_idle(engine)


@pytest.mark.parametrize("logprobs_of", ["all", "last"])
def test_logprobs(logprobs_of: str) -> None:
    model = tiny.decoder()
    prompt = tiny.prompts(1, 25, 25)[0]
    engine = tiny.make_engine(
        model,
        max_num_batched_tokens=64 if logprobs_of == "all" else 6,
        overlap=logprobs_of == "last",
    )
    options = tiny.params(
        temperature=0.8, seed=1, logprobs=3, prompt_logprobs=2, max_tokens=5, ignore_eos=True
    )
    events = [
        e
        for _ in range(2)
        for e in (
            [engine.add(Request(id="x", prompt=prompt, params=options))] and tiny.drain(engine)
        )
    ]
    events = events[:5]
    answer = [e.token_id for e in events]
    logs = unbatched_logits(model, [*prompt, *answer], 25).log_softmax(-1)
    prompt_logprobs = events[0].prompt_logprobs
    assert prompt_logprobs[0] is None
    assert len(prompt_logprobs) == 25
    for i in range(1, 25):
        assert prompt_logprobs[i][prompt[i]].logprob == pytest.approx(
            logs[i - 1, prompt[i]].item(), abs=1e-4
        )
        assert len(prompt_logprobs[i]) in (2, 3)
    for i, event in enumerate(events):
        row = logs[24 + i]
        top = row.topk(3).indices.tolist()
        assert list(event.logprobs)[:3] == top
        assert event.logprobs[event.token_id].logprob == pytest.approx(
            row[event.token_id].item(), abs=1e-4
        )
        assert event.logprobs[event.token_id].rank == int((row > row[event.token_id]).sum()) + 1
    assert events[1].prompt_logprobs is None


def fail_above(engine, size, limit):
    """Let a batch run out of memory whose ``size`` is above the limit."""
    forward = engine.model_runner.forward

    def limited(batch):
        if getattr(batch, size) > limit:
            raise MemoryError
        return forward(batch)

    engine.model_runner.forward = limited


def test_out_of_memory_fails_only_what_must_fail() -> None:
    model = tiny.decoder()
    todo = tiny.requests(tiny.prompts(5, 10, 30))
    expected = tiny.run(tiny.make_engine(model), todo)
    engine = tiny.make_engine(model)
    forward, calls = engine.model_runner.forward, []

    def tight(batch):
        calls.append(batch.tokens)
        if batch.tokens > 3 and len(calls) % 3 == 1:
            raise torch.OutOfMemoryError("no")
        return forward(batch)

    engine.model_runner.forward = tight
    assert tiny.run(engine, todo) == expected

    engine.model_runner.forward = forward
    fail_above(engine, "tokens", 12)
    assert tiny.run(engine, todo) == expected

    engine = tiny.make_engine(model, enable_prefix_caching=False)
    fail_above(engine, "max_context", 30)
    for request in todo:
        engine.add(request)
    ended = tiny.finish_reasons(tiny.drain(engine))
    for i, request in enumerate(todo):
        assert (ended[str(i), 0] == FinishReason.ABORT) == (
            len(request.prompt) + len(expected[str(i), 0]) - 1 > 30
        )
    tiny.assert_idle(engine)


def test_trace_sees_modules_and_may_replace_their_inputs() -> None:
    engine = tiny.make_engine()
    ids = [list(range(2, 12))]
    plain = TeacherForcedScorer(engine).record_module_outputs(ids, "layers.*.mlp*")
    assert set(plain) == {
        f"layers.{i}.mlp{s}"
        for i in (0, 1)
        for s in ("", ".gate_up_proj", ".act", ".down_proj", "_norm")
    }
    assert plain["layers.0.mlp"][0].shape == (10, 32)

    def before(name, args):
        return (torch.zeros_like(args[0]), *args[1:]) if name == "layers.1.mlp" else None

    silent = TeacherForcedScorer(engine).record_module_outputs(ids, "layers.1.mlp", before=before)
    assert not silent["layers.1.mlp"][0].any()
    assert TeacherForcedScorer(engine).record_module_outputs(ids, "head", decode_from=7)["head"][
        1
    ].shape == (1, tiny.VOCAB)


mixes = st.lists(
    st.tuples(
        st.integers(1, 50),
        st.integers(0, 25),
        st.sampled_from([1, 1, 1, 2, 4]),
        st.sampled_from([1, 1, 1, 1, 3]),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from(["run", "run", "run", "abort", "finish"]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=10,
)


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
MIXES = (
    mixes,
    st.integers(8, 20),
    st.integers(5, 40),
    st.sampled_from([4, 9]),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None, max_examples=examples(80, 12), phases=PHASES)
@given(*MIXES)
def test_any_mix_ends_with_nothing_left(mix, pages, budget, seqs, prefix, overlap) -> None:
    ends_with_nothing_left(mix, pages, budget, seqs, prefix, overlap)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000, phases=PHASES)
@given(*MIXES)
def test_a_thousand_mixes_end_with_nothing_left(mix, pages, budget, seqs, prefix, overlap) -> None:
    ends_with_nothing_left(mix, pages, budget, seqs, prefix, overlap)


def ends_with_nothing_left(mix, pages, budget, seqs, prefix, overlap) -> None:
    engine = tiny.make_engine(
        MODEL,
        pages,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=prefix,
        overlap=overlap,
        max_model_len=60,
    )
    prompts = tiny.prompts(len(mix), 50, 50)
    expected, events, waiting = set(), [], list(enumerate(mix))
    clock = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][1][6] <= clock or not engine.has_work):
            i, (length, most, n, beams, warm, fate, _) = waiting.pop(0)
            options = SamplingParams(
                temperature=warm, max_tokens=most, n=n if beams == 1 else 1, num_beams=beams, seed=i
            ).with_defaults({})
            engine.add(Request(id=str(i), prompt=prompts[0][:length], params=options, eos_ids=(1,)))
            expected |= {(str(i), k) for k in range(options.n)}
        clock += 1
        events += engine.step()
        check(engine)
        for i, (_, _, _, _, _, fate, start) in enumerate(mix):
            if clock == start + 4 and fate == "abort":
                engine.abort(str(i))
            if (
                clock == start + 4
                and fate == "finish"
                and str(i) in engine.output_processor.live_sequences
            ):
                engine.finish_on_stop_string(str(i), 0)
                expected.discard((str(i), 0))
        assert clock < 3000
    tiny.assert_idle(engine)
    ended = [(e.request_id, e.index) for e in events if e.finish_reason is not None]
    assert len(ended) == len(set(ended))
    assert expected <= set(ended)


MODEL = tiny.decoder()


def check(engine) -> None:
    """A page's reference count is the number of its sequences; no shared page is written."""
    scheduler = engine.scheduler
    holders: dict[int, int] = {}
    for seq in scheduler.running:
        assert list(scheduler.tables.table[seq.table_row, : len(seq.pages)]) == seq.pages
        assert len(seq.pages) * 8 >= seq.computed
        for page in seq.pages:
            holders[page] = holders.get(page, 0) + 1
    assert {p: n for p, n in enumerate(scheduler.pool.refs) if n} == holders
    assert scheduler.pool.num_available + len(holders) == engine.num_pages
    assert all(not s.pages and s.table_row < 0 for s in scheduler.waiting)
    assert all(a.sort_key < b.sort_key for a, b in pairwise(scheduler.running))


def test_what_a_step_may_hold() -> None:
    model = tiny.decoder()
    config = RunConfig(
        max_num_batched_tokens=60, max_num_seqs=5, page_size=8, enable_prefix_caching=False
    )
    assert scheduler_limits(model, config, on_gpu=False) == SchedulerLimits(
        60, 5, 8, False, None, prefill_all_first=True
    )
    assert scheduler_limits(
        model, config, on_gpu=True
    ).max_mixed_tokens == default_max_mixed_tokens(weight_bytes(model))
    explicit = RunConfig(max_mixed_tokens=9)
    assert [
        scheduler_limits(model, explicit, on_gpu=gpu).max_mixed_tokens for gpu in (False, True)
    ] == [9, 9]
    assert not scheduler_limits(model, explicit, on_gpu=True).prefill_all_first, (
        "an explicit limit is kept"
    )


@pytest.mark.parametrize(
    ("weight_format", "eight"), [("w8a8", True), ("fp8", True), ("int8", False), ("dense", False)]
)
def test_steps_are_larger_where_inputs_have_8_bits(weight_format: str, eight: bool) -> None:
    model = tiny.decoder()
    for module in model.modules():
        if isinstance(module, Linear) and module is not model.head:
            module.weight = base.pack_as_format(
                weight_format, torch.randn(module.shape), torch.float32
            )
    expected = default_max_mixed_tokens(weight_bytes(model), inputs_8bit=eight)
    assert scheduler_limits(model, RunConfig(), on_gpu=True).max_mixed_tokens == expected

"""Which graphs there are; steps of a prompt alone: filled up to few sizes, captured when met again,
the same tokens as without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.config import RunConfig
from modelmill.core.types import Request
from modelmill.loader import capacity
from modelmill.ops.cuda_graph import CapturedGraph, NotCapturable
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime import cuda_graphs, graph_sizes, model_runner
from modelmill.runtime.batch import BatchPacker, LogitRowSpec, PackedBatch, reserve_step_buffers
from modelmill.runtime.batch_buffer_layout import BatchBufferLayout
from modelmill.runtime.cuda_graphs import (
    CAPTURE_AFTER_USES,
    GraphLimits,
    PaddedStepAction,
    PrefillGraphs,
    graph_limits,
)
from modelmill.runtime.graph_sizes import (
    MAX_SINGLE_PROMPT_GRAPHS,
    MAX_WARM_UP_MIXED_GRAPH_SEQS,
    MIXED_GRAPH_TOKEN_COUNTS,
    PREFILL_GRAPH_BYTES,
    SINGLE_PROMPT_GRAPH_TOKEN_COUNTS,
    PaddedStepShape,
    PrefillGraphLimits,
    context_bucket,
    graph_batch_sizes,
    max_mixed_graphs,
)
from modelmill.runtime.tp_worker_pool import (
    TPWorkerPool,
    WorkerCommand,
)
from tests.hypothesis_examples import examples
from tests.runtime import tiny

MODEL_KINDS = [("fixed", None), ("prompt", None), ("running", None), ("fixed", 12)]


class FakeCapturer:
    """Records as a GPU does: what was called is called again on what stands at the same places."""

    def __init__(self, *, broken: bool = False) -> None:
        self.tried = self.captured = self.replayed = 0
        self.broken, self.full = broken, False

    def __call__(self, call: Callable[[], torch.Tensor]) -> CapturedGraph[torch.Tensor]:
        self.tried += 1
        if self.broken:
            raise NotCapturable("it waits for the host")
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        self.captured += 1
        out = torch.empty_like(call())

        def replay() -> None:
            self.replayed += 1
            out.copy_(call())

        return CapturedGraph(cast(Any, SimpleNamespace(replay=replay)), out)


def filling(
    capturer: FakeCapturer,
    model: tiny.Decoder | None = None,
    mixed: int = 0,
    **options: object,
) -> tiny.EngineCore:
    """A loop on the CPU whose prompts go as they do on a GPU; mixed: graphs of mixed steps."""
    engine = tiny.make_engine(model, **options)
    config, longest = engine.config, -(-engine.max_model_len // 8) * 8
    limits = PrefillGraphLimits(config.max_num_batched_tokens, longest, config.max_num_seqs, mixed)
    engine.model_runner.prefill_graphs = PrefillGraphs(
        engine.model_runner.forward, capturer, limits, engine.model_runner.states
    )
    return engine


@given(st.integers(2, 1200), st.integers(0, 9000), st.integers(1, 1500), st.integers(1, 40_000))
def test_a_step_is_filled_up_to_the_next_size(
    tokens: int, before: int, most: int, longest: int
) -> None:
    padded = PrefillGraphLimits(most, longest).padded_shape(tokens, 1, before + tokens)
    sizes = [
        size
        for i, size in enumerate(SINGLE_PROMPT_GRAPH_TOKEN_COUNTS)
        if i == 0 or SINGLE_PROMPT_GRAPH_TOKEN_COUNTS[i - 1] < longest
    ]
    holding = [size for size in sizes if tokens <= size <= most]
    little = bool(holding) and (holding[0] <= 512 or 64 * (holding[0] - tokens) <= holding[0])
    assert (padded is not None) == little
    assert padded is None or (padded.tokens == holding[0] and padded.context >= before + tokens)


def test_a_token_alone_is_no_prompt() -> None:
    assert PrefillGraphLimits(512, 4096).padded_shape(1, 1, 1) is None


@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_the_same_tokens_as_without(rope_length_source: str, window: int | None) -> None:
    model = tiny.decoder(rope_length_source, window)
    todo = tiny.requests(tiny.prompts(12, 1, 60, seed=4))
    capturer = FakeCapturer()
    assert tiny.run_one_by_one(filling(capturer, model), todo) == tiny.run_one_by_one(
        tiny.make_engine(model), todo
    )
    assert 0 < capturer.captured < 8
    assert capturer.replayed >= 12 - 1 - CAPTURE_AFTER_USES * capturer.captured


MIXED_OPTIONS = {"enable_prefix_caching": False, "max_mixed_tokens": 64}


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_mixed_steps_by_graph_give_the_same_tokens(
    rope_length_source: str, window: int | None, *, interactive: bool
) -> None:
    model = tiny.decoder(rope_length_source, window)
    todo = tiny.requests(tiny.prompts(24, 1, 60, seed=4), tiny.params(max_tokens=9))
    capturer = FakeCapturer()
    engine = filling(capturer, model, mixed=9, **MIXED_OPTIONS)
    if interactive:
        sizes = engine.model_runner.mixed_graph_token_counts
        assert sizes == (64,)
        engine.scheduler.optimize_inter_token_latency(None, on_gpu=True, step_sizes=sizes)
        assert engine.scheduler.adaptive_chunk is not None
        assert engine.scheduler.adaptive_chunk.step_sizes == sizes
    assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(model), todo)
    graphs = engine.model_runner.prefill_graphs
    assert graphs is not None
    assert sum(size.is_mixed for size in graphs._captured) > 0
    assert capturer.replayed > 2


@pytest.mark.parametrize("mixed", [0, 9])
def test_prompts_of_a_hybrid_by_graph_give_the_same_tokens(mixed: int) -> None:
    """What runs before a capture advances no recurrent state."""
    model, capturer = tiny.hybrid(), FakeCapturer()
    todo = tiny.requests(tiny.prompts(24, 1, 60, seed=4), tiny.params(max_tokens=9))
    engine = filling(capturer, model, mixed=mixed, **MIXED_OPTIONS)
    expected = tiny.run(tiny.make_engine(tiny.hybrid()), todo)
    assert tiny.run(engine, todo) == expected
    for _ in range(2):
        assert tiny.run_one_by_one(engine, todo) == expected
    graphs = engine.model_runner.prefill_graphs
    assert graphs is not None
    assert any(size.is_mixed for size in graphs._captured) == bool(mixed)
    assert capturer.replayed > 5


def test_a_mixed_graph_reads_ids_that_only_the_device_knows() -> None:
    """The overlapped step takes a sequence's last id from the step that still runs."""
    model = tiny.decoder()
    todo = tiny.requests(tiny.prompts(24, 1, 60, seed=7), tiny.params(max_tokens=12))
    capturer = FakeCapturer()
    engine = filling(capturer, model, mixed=9, overlap=True, **MIXED_OPTIONS)
    assert engine.model_runner.keep_last_ids
    assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(model), todo)
    assert capturer.replayed > 2


@given(
    tokens=st.integers(2, 1300), seqs=st.integers(2, 300), context=st.integers(2, 40_000),
    most=st.integers(64, 8192), max_seqs=st.integers(2, 300),
)  # fmt: skip
def test_a_mixed_step_is_padded_to_sizes_that_hold_it(
    tokens: int, seqs: int, context: int, most: int, max_seqs: int
) -> None:
    limits = PrefillGraphLimits(most, 32_768, max_seqs, 9)
    padded = limits.padded_shape(tokens, seqs, context)
    fits = tokens <= max(s for s in MIXED_GRAPH_TOKEN_COUNTS if s <= most) and seqs <= max_seqs
    assert (padded is not None) == fits
    if padded is not None:
        assert tokens <= padded.tokens <= most
        assert seqs <= padded.seqs <= max(4 * seqs, 16)
        assert padded.seqs <= max_seqs
        assert context <= padded.context
    assert PrefillGraphLimits(most, 32_768, max_seqs).padded_shape(tokens, seqs, context) is None


@pytest.mark.parametrize(("max_seqs", "max_mixed"), [(1, 48), (5, 48), (256, 48), (256, 13)])
def test_mixed_steps_of_few_sequences_are_captured_beforehand(
    max_seqs: int, max_mixed: int
) -> None:
    limits = PrefillGraphLimits(8192, 4096, max_seqs, max_mixed)
    mixed = [size for size in limits.capture_sizes() if size.is_mixed]
    seqs = [n for n in limits.mixed_seqs if 1 < n <= MAX_WARM_UP_MIXED_GRAPH_SEQS]
    assert (
        len(set(mixed)) == len(mixed) == min(len(seqs) * len(MIXED_GRAPH_TOKEN_COUNTS), max_mixed)
    )
    assert all(limits.padded_shape(*size) == size for size in mixed)
    assert limits.capture_sizes() == sorted(limits.capture_sizes(), reverse=True)
    if max_mixed == 13:
        assert {size.seqs for size in mixed} == {16, 64}
        assert PaddedStepShape(64, 64, 4096) in mixed, "it holds every small step"
    assert PaddedStepShape(768, 16, 4096) in mixed or max_seqs < 16


def test_a_step_that_may_not_be_captured_takes_a_larger_graph() -> None:
    limits = PrefillGraphLimits(8192, 32_768, 256, 2)
    graphs = PrefillGraphs(lambda _: torch.empty(0), FakeCapturer(), limits)
    for size in (PaddedStepShape(512, 64, 4096), PaddedStepShape(256, 64, 4096)):
        graphs._captured[size] = cast(Any, None)
    assert graphs.padded_shape(100, 9, 1000) == (256, 64, 4096)
    assert graphs.padded_shape(300, 64, 1000) == (512, 64, 4096)
    assert graphs.padded_shape(600, 9, 1000) is None
    assert graphs.padded_shape(100, 65, 1000) is None
    assert graphs.padded_shape(100, 9, 5000) is None


def test_mixed_graphs_take_a_small_share_of_the_memory() -> None:
    assert [max_mixed_graphs(gib << 30) for gib in (0, 8, 24, 80, 140)] == [0, 3, 9, 32, 48]


def test_warm_up_captures_what_requests_then_replay() -> None:
    model = tiny.decoder()
    capturer = FakeCapturer()
    engine = filling(capturer, model, mixed=40, **MIXED_OPTIONS)
    graphs = engine.model_runner.prefill_graphs
    assert graphs is not None
    engine.model_runner.capture_prefill_graphs()
    captured = len(graphs)
    assert captured == len(graphs.limits.capture_sizes())
    todo = tiny.requests(tiny.prompts(24, 1, 60, seed=4), tiny.params(max_tokens=9))
    assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(model), todo)
    assert len(graphs) == captured
    assert capturer.replayed > 5


class LoopbackWorkers:
    """Runs each command of rank 0 at once in a second runner, which has the same whole model."""

    def __init__(self, runner: model_runner.ModelRunner) -> None:
        self.runner, self.commands = runner, list[str]()

    translate_errors = nullcontext

    def broadcast(self, command: WorkerCommand, data: memoryview) -> None:
        """As ``TPWorkerPool.broadcast``, and what ``tp_worker_process`` does."""
        self.commands.append(command.command)
        command = WorkerCommand.unpack(command.pack())
        views, buffer = self.runner.packer.next_receive_buffer(command.layout)
        buffer[:] = data
        self.runner.packer.upload(views)
        self.runner.run_step_command(command, command.batch(views))


@pytest.mark.parametrize("warm", [False, True])
def test_other_ranks_run_the_graphs_that_rank_0_runs(*, warm: bool) -> None:
    model, capturers = tiny.decoder(), (FakeCapturer(), FakeCapturer())
    first, second = (
        filling(each, model, mixed=9, **MIXED_OPTIONS) for each in capturers
    )  # fmt: skip
    workers = LoopbackWorkers(second.model_runner)
    first.model_runner.tp_workers = cast(TPWorkerPool, workers)
    if warm:
        first.model_runner.capture_prefill_graphs()
    todo = tiny.requests(tiny.prompts(24, 1, 60, seed=4), tiny.params(max_tokens=9))
    assert tiny.run(first, todo) == tiny.run(tiny.make_engine(model), todo)
    uses = {"launch padded", "capture padded", "replay padded"}
    assert uses <= set(workers.commands)
    for each in ("captured", "replayed"):
        assert getattr(capturers[0], each) == getattr(capturers[1], each) > 0
    for pair in zip(first.model_runner.kv.tensors, second.model_runner.kv.tensors):
        assert torch.equal(*pair)


def test_a_rank_that_cannot_capture_sums_as_often_as_rank_0() -> None:
    """It launches each step that rank 0 captures or replays, once."""
    launched: list[object] = []

    def forward(batch: object) -> torch.Tensor:
        launched.append(batch)
        return torch.empty(0)

    limits = PrefillGraphLimits(512, 4096)
    graphs = PrefillGraphs(forward, FakeCapturer(broken=True), limits, is_parallel=True)
    for use in (PaddedStepAction.LAUNCH, PaddedStepAction.CAPTURE, PaddedStepAction.REPLAY):
        graphs.run(cast(Any, use), PaddedStepShape(16, 1, 4096), use)
    assert launched == [PaddedStepAction.LAUNCH, PaddedStepAction.CAPTURE, PaddedStepAction.REPLAY]


def test_with_other_ranks_an_out_of_memory_error_of_a_capture_is_raised() -> None:
    """Another rank may have run the calls before its capture, whose sums this one lacks."""
    capturer, limits = FakeCapturer(), PrefillGraphLimits(512, 4096)
    capturer.full = True
    graphs = PrefillGraphs(lambda _: torch.empty(0), capturer, limits, is_parallel=True)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(cast(Any, None), PaddedStepShape(16, 1, 4096), PaddedStepAction.CAPTURE)


@settings(max_examples=examples(30, 12), deadline=None)
@given(
    st.lists(
        st.lists(st.integers(2, tiny.VOCAB - 1), min_size=1, max_size=70), min_size=1, max_size=6
    ),
    st.sampled_from(
        [{}, {"pages": 16}, {"max_num_batched_tokens": 20}, {"enable_prefix_caching": False}]
    ),
    st.booleans(),
    st.sampled_from([0, 1, 9]),
)
def test_whatever_comes_the_tokens_are_the_same(
    prompts: list[list[int]], options: dict, together: bool, mixed: int
) -> None:
    model = tiny.decoder("prompt")
    todo = tiny.requests([tuple(prompt) for prompt in prompts], tiny.params(max_tokens=4))
    run = tiny.run if together else tiny.run_one_by_one
    assert run(filling(FakeCapturer(), model, mixed, **options), todo) == run(
        tiny.make_engine(model, **options), todo
    )


def test_many_ways_to_ask_beside_it() -> None:
    """Forks, beams, log-probabilities of the prompt and draws: their steps are left as they are, or
    filled.
    """
    ways = [
        tiny.params(n=3, temperature=1.0, seed=1),
        tiny.params(num_beams=3, n=2),
        tiny.params(logprobs=2, prompt_logprobs=1),
        tiny.params(temperature=0.8, seed=3, top_p=0.9),
        tiny.params(repetition_penalty=1.3, min_tokens=5),
        tiny.params(max_tokens=0),
    ]
    model = tiny.decoder()
    prompts = tiny.prompts(len(ways), 20, 20)
    todo = [
        Request(id=str(i), prompt=p, params=h, eos_ids=(1,))
        for i, (p, h) in enumerate(zip(prompts, ways))
    ]
    engine = filling(FakeCapturer(), model, mixed=9)
    for _ in range(3):
        for request in todo:
            assert tiny.run(engine, [request]) == tiny.run(
                tiny.make_engine(model, seed=0), [request]
            ), request
            engine.scheduler.pool.clear_prefix_cache()


def test_the_first_meeting_is_not_recorded_and_each_kind_is_once() -> None:
    capturer = FakeCapturer()
    engine = filling(capturer, enable_prefix_caching=False)
    one = tiny.requests([(5, 6, 7)], tiny.params(max_tokens=1))
    for meeting in range(1, 6):
        tiny.run(engine, one)
        assert capturer.captured == (meeting >= CAPTURE_AFTER_USES)
        assert capturer.replayed == max(0, meeting - CAPTURE_AFTER_USES + 1)
    assert engine.model_runner.prefill_graphs is not None
    assert len(engine.model_runner.prefill_graphs) == 1


def test_what_cannot_be_recorded_is_launched_and_not_tried_again() -> None:
    todo = tiny.requests([(5, 6, 7)], tiny.params(max_tokens=3))
    capturer = FakeCapturer(broken=True)
    engine = filling(capturer, enable_prefix_caching=False)
    for _ in range(CAPTURE_AFTER_USES + 2):
        assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(), todo)
    assert capturer.tried == 1
    assert engine.model_runner.prefill_graphs is not None
    assert len(engine.model_runner.prefill_graphs) == 0
    assert engine.model_runner.prefill_graphs.padded_shape(3, 1, 3) is None, (
        "filling without a graph costs time"
    )


def test_without_memory_it_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "OOM_RETRY_USES", 3)
    todo = tiny.requests([(5, 6, 7)], tiny.params(max_tokens=1))
    capturer = FakeCapturer()
    engine = filling(capturer, enable_prefix_caching=False)
    capturer.full = True
    for _ in range(CAPTURE_AFTER_USES):
        assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(), todo)
    capturer.full = False
    for meeting in range(1, 3 + CAPTURE_AFTER_USES + 1):
        assert tiny.run(engine, todo) == tiny.run(tiny.make_engine(), todo)
        assert capturer.tried == (2 if meeting == 3 + CAPTURE_AFTER_USES else 1)
    assert capturer.captured == 1


def test_no_more_are_kept_than_memory_was_set_aside_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_sizes, "MAX_SINGLE_PROMPT_GRAPHS", 2)
    engine = filling(FakeCapturer(), enable_prefix_caching=False)
    todo = tiny.requests([tuple(range(2, 2 + n)) for n in (10, 20, 40)], tiny.params(max_tokens=1))
    for _ in range(CAPTURE_AFTER_USES + 1):
        assert tiny.run_one_by_one(engine, todo) == tiny.run_one_by_one(tiny.make_engine(), todo)
    graphs = engine.model_runner.prefill_graphs
    assert graphs is not None
    assert len(graphs) == 2
    assert [graphs.padded_shape(n, 1, n) is not None for n in (10, 20, 40)] == [True, True, False]


@pytest.mark.parametrize(
    ("longest", "most"), [(112, 8192), (40, 8192), (4608, 8192), (100_000, 300)]
)
def test_what_is_recorded_beforehand_is_what_requests_bring(longest: int, most: int) -> None:
    limits = PrefillGraphLimits(most, longest)
    brought = {limits.padded_shape(n, 1, n) for n in range(2, min(longest, most, 1024) + 1)} - {
        None
    }
    assert set(limits.capture_sizes()) == brought
    assert len(brought) <= MAX_SINGLE_PROMPT_GRAPHS


def test_forward_hooks_get_the_prompt_as_it_is() -> None:
    engine = filling(FakeCapturer())
    lengths: list[int] = []
    with engine.model_runner.forward_hooks(
        after=lambda name, _, out: lengths.append(len(out)) if name == "embed" else None
    ):
        tiny.run(engine, tiny.requests([(5, 6, 7)], tiny.params(max_tokens=1)))
    assert lengths == [3]


def test_nothing_is_written_behind_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy is under way by then."""
    engine = filling(FakeCapturer())
    packer, sent = engine.model_runner.packer, []
    pack, send = packer.pack, packer.upload

    def checked(*args: object, **named: object) -> PackedBatch:
        batch = pack(*args, **named)  # type: ignore[arg-type]
        assert bytes(packer.packed_host_buffer(batch)) == sent[-1]
        return batch

    monkeypatch.setattr(
        packer,
        "upload",
        lambda views: (
            sent.append(bytes(packer._buffer_memoryview(packer._buffer_index, views))),
            send(views),
        ),
    )
    monkeypatch.setattr(packer, "pack", checked)
    tiny.run(engine, tiny.requests(tiny.prompts(6, 1, 60)))
    tiny.run_one_by_one(engine, tiny.requests(tiny.prompts(6, 1, 60, seed=2)))
    assert len(sent) > 12


def test_sizes_and_buckets() -> None:
    assert graph_batch_sizes(1) == [1]
    assert graph_batch_sizes(3) == [1, 2, 4]
    assert graph_batch_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert graph_batch_sizes(256)[-1] == 256
    assert graph_batch_sizes(300)[-2:] == [288, 320]
    assert [context_bucket(n) for n in (1, 4096, 4097, 16384, 16385)] == [
        4096,
        4096,
        16384,
        16384,
        65536,
    ]


@pytest.mark.parametrize(
    ("enabled", "rows", "max_seqs"), [(True, 40, 40), (True, 4000, 512), (False, 40, None)]
)
def test_graphs_and_the_buffer_whose_address_they_know(
    enabled: bool, rows: int, max_seqs: int | None
) -> None:
    reserved: list[BatchBufferLayout] = []
    packer = SimpleNamespace(reserve=reserved.append, state_padding=None, page_groups=1)
    config = RunConfig(
        cuda_graphs=enabled, max_num_seqs=rows, max_num_batched_tokens=5000, page_size=16
    )
    reserve_step_buffers(cast(BatchPacker, packer), config, 7)
    assert reserved == [BatchBufferLayout(5000, rows, 5000 + rows, 14)]
    limits = graph_limits(config, 7, 80 << 30)
    if max_seqs is None:
        assert limits is None
    else:
        prefill = PrefillGraphLimits(5000, 7 * 16, max_seqs, 32)
        assert limits == GraphLimits(max_seqs, 7 * 16, prefill)
        of_ranks = graph_limits(replace(config, tp=4), 7, 80 << 30)
        assert of_ranks is not None
        assert of_ranks.prefill == replace(prefill, max_tokens=512)
    assert graph_limits(config, 7, 0) is None, "no GPU"


@pytest.mark.parametrize(
    ("model", "options", "singles", "mixed"),
    [
        (tiny.decoder, {}, MAX_SINGLE_PROMPT_GRAPHS, 48),
        (tiny.decoder, {"max_num_seqs": 1}, MAX_SINGLE_PROMPT_GRAPHS, 0),
        (tiny.decoder, {"max_num_batched_tokens": 63}, MAX_SINGLE_PROMPT_GRAPHS, 0),
        (tiny.hybrid, {}, MAX_SINGLE_PROMPT_GRAPHS, 48),
    ],
)
def test_memory_is_set_aside_for_prefill_graphs_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[], tiny.Decoder],
    options: dict[str, Any],
    singles: int,
    mixed: int,
) -> None:
    engine = tiny.make_engine(model(), **options)
    set_aside: list[int] = []
    determine_num_kv_pages = capacity.determine_num_kv_pages
    monkeypatch.setattr(capacity, "total_gpu_bytes", lambda device: 140 << 30)
    monkeypatch.setattr(
        capacity,
        "determine_num_kv_pages",
        lambda *args: set_aside.append(args[6]) or determine_num_kv_pages(*args),
    )
    engine._plan_cache_sizes_and_cap_max_seqs(SINGLE_RANK)
    assert set_aside == [(singles + mixed) * PREFILL_GRAPH_BYTES]
    limits = engine._graph_limits(7)
    assert limits is not None
    assert limits.prefill.max_mixed_graphs == mixed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_runner_has_its_graphs_from_the_start(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """What the constructors get: on a GPU they would reserve a memory pool."""
    made: dict[str, tuple[Any, ...]] = {}
    for name in ("DecodeGraphs", "PrefillGraphs"):
        monkeypatch.setattr(
            model_runner,
            name,
            lambda *args, name=name, **named: made.update({name: (*args, named)}) or name,
        )
    monkeypatch.setattr(model_runner, "PrefillGraphCapturer", lambda: "capturer")
    before = tiny.make_engine().model_runner
    runner = model_runner.ModelRunner(
        before.model, before.ops, before.kv, before.packer, before.sampler, 4,
        TPGroup(size=ranks), graph_limits=GraphLimits(3, 112, PrefillGraphLimits(96, 112, 3, 5)),
    )  # fmt: skip
    forward, select_ids = runner.forward, runner.sampler.select_ids
    limits = PrefillGraphLimits(96, 112, 3, 5)
    assert made == {
        "DecodeGraphs": (
            forward, select_ids, runner.last_ids, runner.packer, 3, 112, None, {}
        ),
        "PrefillGraphs": (forward, "capturer", limits, None, {"is_parallel": ranks > 1}),
    }  # fmt: skip
    assert runner.decode_graphs == "DecodeGraphs"
    assert runner.prefill_graphs == "PrefillGraphs"


def test_a_capture_does_not_advance_recurrent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up runs the step twice; keys and values are the same then, states are not."""
    engine = tiny.make_engine(tiny.hybrid(), enable_prefix_caching=False)
    runner = engine.model_runner
    engine.add(tiny.requests([tuple(range(2, 12))], tiny.params(max_tokens=4))[0])
    engine.step()
    states = runner.states
    assert states is not None
    before = states.buffer.clone()
    assert before[0].any()
    monkeypatch.setattr(cuda_graphs, "run_without_host_sync", lambda call: call())
    monkeypatch.setattr(cuda_graphs, "run_on_side_stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(cuda_graphs, "GraphCapturer", lambda: SimpleNamespace(capture=lambda _: 0))
    graphs = cuda_graphs.DecodeGraphs(
        runner.forward, runner.sampler.select_ids, runner.last_ids, runner.packer, 2, 64, states
    )
    seq = engine.scheduler.running[0]
    batch = runner.packer.pack([(seq, 1)], LogitRowSpec([0], [-1]), (1, 64))
    assert graphs._capture(batch, cuda_graphs.GREEDY_GRAPH_OUTPUT) == 0
    changed = (states.buffer != before).any(1).nonzero()[:, 0].tolist()
    assert changed in ([], [states.num_slots - 1])  # padding rows write to the last slot
    runner.forward(batch)
    assert not torch.equal(states.buffer[0], before[0])

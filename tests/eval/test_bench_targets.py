"""Engine and transformers behind one interface, sweeps that end with the memory, and their
figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError
from modelmill.core.types import TokenOutput
from modelmill.eval import bench_targets, latency, throughput
from modelmill.eval.bench_targets import EngineScorer, EngineTarget, HfTarget, TargetRun
from modelmill.eval.datasets import BenchRequest, random_requests
from modelmill.eval.latency import LatencyShape
from modelmill.eval.perplexity import measure_perplexity
from tests.eval.fake_engine_core import FakeEngineCore


def test_an_engine_serves_all_requests_to_their_lengths() -> None:
    work = random_requests([(3, 4), (5, 1), (2, 7)], 50, 0)
    run = EngineTarget(FakeEngineCore()).run(work)
    assert (run.input_tokens, run.output_tokens) == (10, 12)
    assert len(run.all_first_token_seconds) == 3
    assert 0 < run.first_token_seconds <= run.total_seconds


def test_running_out_of_memory_is_an_error_and_leaves_nothing_behind() -> None:
    loop = FakeEngineCore(fail_at=2)
    with pytest.raises(CapacityError, match="ran out of memory"):
        EngineTarget(loop).run(random_requests([(3, 4)] * 2, 50, 0))
    assert not loop.live


def test_a_batch_must_fit_the_kv_cache_as_a_whole() -> None:
    subject = EngineTarget(
        FakeEngineCore(num_pages=4, page_size=16, config=RunConfig(max_num_seqs=8))
    )
    assert subject.capacity_problem(2, 32) is None
    assert "64 tokens" in str(subject.capacity_problem(3, 32))
    assert "64" in str(subject.capacity_problem(1, 65))
    assert "--max-num-seqs" in str(subject.capacity_problem(9, 1))


def test_a_sweep_ends_where_memory_ends_and_says_so() -> None:
    subject = EngineTarget(FakeEngineCore(num_pages=4))
    shapes = [LatencyShape(batch, 8, 4) for batch in (1, 2, 4, 8, 16)]
    sweep = latency.sweep_shapes([subject], shapes, 50, runs=2, warmup=1)
    assert [each.shape.batch for each in sweep.results] == [1, 2, 4]
    assert sweep.stop_reason is not None
    assert sweep.stop_reason.startswith("batch 8: ")
    with pytest.raises(CapacityError):
        latency.sweep_shapes([subject], shapes[4:], 50, runs=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the subjects' clock tells; a test moves it."""
    now = [0.0]
    monkeypatch.setattr(bench_targets.time, "perf_counter", lambda: now[0])
    return now


class OneByOne(FakeEngineCore):
    """Takes in one prompt a step, as where each fills a step, while the answers before it go on; a
    step is a second.
    """

    clock: list[float]

    def step(self) -> list[TokenOutput]:
        self.clock[0] += 1.0
        begun = [id for id, ids in self.live.items() if len(ids) > len(self.requests[id].prompt)]
        fresh = [id for id in self.live if id not in begun][:1]
        return [self._advance(id) for id in (*begun, *fresh)]


def one_by_one(clock: list[float]) -> EngineTarget:
    loop = OneByOne(max_model_len=1000, num_pages=1000)
    loop.clock = clock
    return EngineTarget(loop)


def median_rates(clock: list[float], shape: LatencyShape, runs: int) -> tuple[float, float]:
    """Milliseconds a token and tokens a second, of answers that begin one by one."""
    report = latency.measure_latency([one_by_one(clock)], shape, 50, runs=runs, warmup=0)[0]
    assert report.per_token_ms is not None
    assert report.output_tokens_per_s is not None
    return report.per_token_ms.median, report.output_tokens_per_s.median


def test_tokens_of_early_answers_while_late_ones_wait_are_not_counted_after_the_first(
    clock: list[float],
) -> None:
    # four answers of five tokens begin at 1, 2, 3, 4 s and end at 5, 6, 7, 8 s
    run = one_by_one(clock).run([BenchRequest((1,), 5)] * 4)
    assert (run.first_token_seconds, run.total_seconds, run.all_first_token_seconds) == (
        4.0,
        8.0,
        (1.0, 2.0, 3.0, 4.0),
    )
    assert run.seconds_per_token == (1.0, 1.0, 1.0, 1.0)
    assert run.later_tokens == 1 + 2 + 3 + 4, "16 - 6: what came until 4 s is before"
    clock[0] = 0.0
    assert median_rates(clock, LatencyShape(4, 1, 5), runs=2) == pytest.approx((1000.0, 10 / 4))


def test_an_early_answer_that_ended_before_the_last_began(clock: list[float]) -> None:
    # one token came after the last first
    assert median_rates(clock, LatencyShape(8, 1, 2), runs=1) == pytest.approx((1000.0, 1.0))


def test_transformers_times_per_token_and_after_the_first(clock: list[float]) -> None:
    class Fake:
        device = "cpu"

        def generate(
            self, prompts: Sequence[Sequence[int]], length: int
        ) -> tuple[list[list[int]], list[float]]:
            clock[0] += 0.5 + 0.25 * (length - 1)
            return [[0] * length for _ in prompts], [0.5 + 0.25 * step for step in range(length)]

    run = HfTarget(Fake(), 2).run(
        [BenchRequest((1,), 3), BenchRequest((1,), 5), BenchRequest((1,), 1)]
    )
    assert run.all_first_token_seconds == (0.5, 0.5, 2.0)
    assert run.seconds_per_token == (0.25, 0.25), (
        "an answer of one token has no time between tokens"
    )
    assert (run.first_token_seconds, run.later_tokens) == (2.0, 0)
    assert (
        HfTarget(Fake(), 2).run([BenchRequest((1,), 3), BenchRequest((1,), 5)]).later_tokens
        == 2 + 4
    )


class Timed:
    """A subject whose times are given."""

    def __init__(self, name: str, first: float, step: float) -> None:
        self.name, self.device = name, "cpu"
        self.firsts, self.step = first, step
        self.batches: list[list[BenchRequest]] = []
        self.warmed = 0

    def warm_up(self, max_requests: int) -> None:
        self.warmed = max_requests

    def run(self, work: Sequence[BenchRequest], on_progress: object = None) -> TargetRun:
        self.batches.append(list(work))
        total = self.firsts + self.step * (work[0].output - 1)
        inputs, outputs = sum(len(w.prompt) for w in work), sum(w.output for w in work)
        steps = tuple([self.step] * len(work))
        return TargetRun(
            self.firsts,
            total,
            tuple([self.firsts] * len(work)),
            steps,
            outputs - len(work),
            inputs,
            outputs,
        )

    def capacity_problem(self, batch: int, length: int) -> str | None:
        return None


def test_latency_figures_and_turns() -> None:
    engine_target, hf_target = Timed("modelmill", 0.1, 0.01), Timed("transformers", 0.4, 0.04)
    reports = latency.measure_latency(
        [engine_target, hf_target], LatencyShape(4, 100, 11), 50, runs=3, warmup=2
    )
    assert [each.subject for each in reports] == ["modelmill", "transformers"]
    engine_report = reports[0]
    assert engine_report.per_token_ms is not None
    assert engine_report.output_tokens_per_s is not None
    assert engine_report.first_token_ms.median == pytest.approx(100)
    assert engine_report.per_token_ms.median == pytest.approx(10)
    assert engine_report.input_tokens_per_s.median == pytest.approx(4 * 100 / 0.1)
    assert engine_report.output_tokens_per_s.median == pytest.approx(4 / 0.01)
    assert engine_report.total_ms.runs == 3
    assert engine_target.batches == hf_target.batches, "both sides get the same ids"
    assert len({tuple(work[0].prompt) for work in engine_target.batches}) == 5, (
        "every run has fresh ids"
    )


def test_one_output_token_has_no_time_per_token() -> None:
    reports = latency.measure_latency(
        [Timed("modelmill", 0.1, 0.01)], LatencyShape(1, 8, 1), 50, runs=1, warmup=0
    )
    assert reports[0].per_token_ms is None
    assert reports[0].to_dict()["output_tokens_per_s"] is None


def test_throughput_figures() -> None:
    work = [BenchRequest((1, 2, 3), 11)] * 5
    report = throughput.measure_throughput([Timed("modelmill", 0.1, 0.09)], work, runs=2, warmup=1)[
        0
    ]
    assert report.seconds.median == pytest.approx(1.0)
    assert report.requests_per_s.median == pytest.approx(5.0)
    assert report.input_tokens_per_s.median == pytest.approx(15.0)
    assert report.output_tokens_per_s.median == pytest.approx(55.0)
    assert report.first_token_ms.median == pytest.approx(100.0)


def test_transformers_runs_in_static_batches_and_counts_what_was_asked() -> None:
    class Fake:
        device = "cpu"

        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def generate(
            self, prompts: Sequence[Sequence[int]], length: int
        ) -> tuple[list[list[int]], list[float]]:
            self.calls.append((len(prompts), length))
            return [[0] * length for _ in prompts], [0.01] * length

    fake = Fake()
    run = HfTarget(fake, 2).run(
        [BenchRequest((1,), 3), BenchRequest((1, 2), 5), BenchRequest((1,), 1)]
    )
    assert fake.calls == [(2, 5), (1, 1)]
    assert (run.input_tokens, run.output_tokens) == (4, 9)
    assert len(run.all_first_token_seconds) == 3


def test_engine_scores_are_those_of_its_prompt_logprobs() -> None:
    loop = FakeEngineCore()
    windows = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    scores = list(EngineScorer(loop, max_in_flight=2).score(windows))
    assert scores == [[loop.logprob(a, b) for a, b in itertools.pairwise(w)] for w in windows]
    assert (
        measure_perplexity(list(range(20)), EngineScorer(loop), max_length=8, stride=4).tokens == 19
    )

"""The lines of the speed table, and sides that take turns."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.figure_statistics import LONG, SHORT
from benchmarks.peer_process import Lengths
from benchmarks.targets import TARGETS
from benchmarks.workloads import (
    CALLS_PER_BLOCK,
    DECODE_WORKLOADS,
    TARGET_MARKS,
    WARM_UP_CALLS,
    Workload,
    measure_in_blocks,
    measure_in_turn,
    warm_up,
    workloads_for,
    workloads_of_mark,
)
from modelmill.runtime.cuda_graphs import CAPTURE_AFTER_USES


class Clocked:
    """A side that answers with made-up seconds and notes who was asked when."""

    def __init__(self, name: str, step: float, calls: list[tuple[str, int, int]]) -> None:
        self.name, self.step, self.calls = name, step, calls

    def generate(self, lengths: Lengths, seed: int) -> float:
        self.calls.append((self.name, lengths[0][1], seed))
        return 1.0 + lengths[0][1] * self.step


def test_every_line_with_turns_has_a_target_unless_none_was_set() -> None:
    names = {work.name for part in (*DECODE_WORKLOADS, "first") for work in workloads_for(part)}
    assert names - set(TARGETS) == {"gpt2-64x128"}
    for target in map(TARGETS.get, names & set(TARGETS)):
        assert target is not None
        assert (target.floor or 0) < target.stretch_goal < target.required


def test_sides_take_turns_on_the_same_ids_and_the_first_round_is_not_counted() -> None:
    calls: list[tuple[str, int, int]] = []
    engine, peer = Clocked("ours", 0.004, calls), Clocked("peer", 0.008, calls)
    figures = measure_in_turn(Workload("decode-2x8", (8, 8)), [engine, peer], rounds=2)  # type: ignore[list-item]
    assert figures["ours"].value == pytest.approx(4.0)
    assert figures["peer"].value == pytest.approx(8.0)
    assert figures["ours"].runs == 4
    firsts = [name for name, output, _ in calls if output == SHORT]
    twice = ["ours", "ours", "peer", "peer", "peer", "peer", "ours", "ours"]
    assert firsts == ["peer", "ours", *twice], "another side begins each round"
    seeds = [seed for name, _, seed in calls if name == "ours"]
    assert set(seeds) == {seed for name, _, seed in calls if name == "peer"}
    assert len(set(seeds)) == len(seeds), "no call repeats a prompt"


def test_a_slow_side_may_have_the_first_rounds_alone() -> None:
    calls: list[tuple[str, int, int]] = []
    engine, peer = Clocked("ours", 0.004, calls), Clocked("peer", 0.008, calls)
    estimates: list[dict[str, float]] = []
    done: list[tuple[int, int]] = []

    def choose(seconds: Mapping[str, float]) -> dict[str, int]:
        estimates.append(dict(seconds))
        return {"ours": 3, "peer": 1}

    figures = measure_in_turn(
        Workload("decode-1x8", (8,)), [engine, peer], rounds=5,  # type: ignore[list-item]
        choose_rounds=choose, on_round=lambda *each: done.append(each),
    )  # fmt: skip
    # a round calls each length twice, the warm-up once
    assert estimates[0]["ours"] == pytest.approx(2 * (2 + (SHORT + LONG) * 0.004))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert (figures["ours"].runs, figures["peer"].runs) == (6, 2)
    seeds = [seed for name, _, seed in calls if name == "peer"]
    assert seeds == [seed for name, _, seed in calls if name == "ours"][: len(seeds)]


def test_a_side_may_be_left_out_after_its_first_call() -> None:
    calls: list[tuple[str, int, int]] = []
    sides = [Clocked("ours", 0.004, calls), Clocked("peer", 8.0, calls)]
    figures = measure_in_turn(
        Workload("decode-1x8", (8,)), sides, rounds=1,  # type: ignore[arg-type]
        goes_on=lambda name, seconds: seconds < 1000,
        choose_rounds=lambda seconds: dict.fromkeys(seconds, 1),
    )  # fmt: skip
    assert list(figures) == ["ours"]
    assert [output for name, output, _ in calls if name == "peer"] == [SHORT]


class Warm(Clocked):
    """A side on a card that is slower, by as much as it takes, after a call of prompts alone."""

    def generate(self, lengths: Lengths, seed: int) -> float:
        """After a short call a call takes 0.3 s more."""
        late = 0.3 if self.calls and self.calls[-1][1] == SHORT else 0.0
        return super().generate(lengths, seed) + late


def test_neither_length_is_always_called_on_a_warmer_card() -> None:
    figures = measure_in_turn(Workload("decode-2x8", (8, 8)), [Warm("ours", 0.004, [])], rounds=3)  # type: ignore[list-item]
    assert figures["ours"].value == pytest.approx(4.0)
    assert figures["ours"].max > 4.0


def test_the_first_token_is_a_whole_call_in_milliseconds() -> None:
    figures = measure_in_turn(workloads_for("first")[0], [Clocked("ours", 0.0, [])], rounds=3)  # type: ignore[list-item]
    assert figures["ours"].value == pytest.approx(1000.0)


@pytest.mark.parametrize("outputs", [(1,), (SHORT, LONG)], ids=["first", "decode"])
def test_no_counted_call_is_one_that_captures_a_graph(outputs: tuple[int, ...]) -> None:
    assert WARM_UP_CALLS >= CAPTURE_AFTER_USES
    calls: list[tuple[str, int, int]] = []
    sides = [Clocked("ours", 0.004, calls), Clocked("peer", 0.008, calls)]
    estimates: list[Mapping[str, float]] = []

    def choose(seconds: Mapping[str, float]) -> dict[str, int]:
        for side in sides:
            assert [name for name, *_ in calls].count(side.name) >= CAPTURE_AFTER_USES
        estimates.append(seconds)
        return dict.fromkeys(seconds, 1)

    measure_in_turn(Workload("x", (8,), outputs), sides, 1, choose_rounds=choose)  # type: ignore[arg-type]
    seeds = [seed for name, _, seed in calls if name == "ours"]
    assert len(set(seeds)) == len(seeds), "no call repeats a prompt"
    one_round = sum(1.0 + 0.004 * output for output in outputs) * len(outputs)
    assert estimates[0]["ours"] == pytest.approx(one_round)


def test_the_warm_part_is_the_first_token_under_names_of_its_own() -> None:
    warm, first = workloads_for("warm"), workloads_for("first")
    assert [(work.prompts, work.outputs) for work in warm] == [
        (work.prompts, work.outputs) for work in first
    ]
    assert not {work.name for work in warm} & set(TARGETS), (
        "the table keeps the line that was measured first"
    )


def test_marks_are_taken_in_blocks_of_one_length_and_sides_take_turns() -> None:
    calls: list[tuple[str, int, int]] = []
    engine, peer = Clocked("ours", 0.004, calls), Clocked("peer", 0.008, calls)
    (decode, steps), (first, firsts) = measure_in_blocks(1, 1024, [engine, peer], rounds=2)  # type: ignore[list-item]
    assert (decode.name, first.name) == ("decode-1x1024", "first-1024")
    assert [steps[name].value for name in ("ours", "peer")] == pytest.approx([4.0, 8.0])
    assert firsts["ours"].value == pytest.approx(1004.0)
    block = [*[SHORT] * CALLS_PER_BLOCK, *[LONG] * CALLS_PER_BLOCK, *[1] * CALLS_PER_BLOCK]
    warm, later = [8] * WARM_UP_CALLS, [8]
    assert [output for _, output, _ in calls] == [
        *2 * [*warm, *block], *2 * [*later, *block],
    ]  # fmt: skip
    assert [name for name, output, _ in calls if output == 8] == [
        *["ours"] * WARM_UP_CALLS, *["peer"] * WARM_UP_CALLS, "peer", "ours",
    ]  # fmt: skip
    seeds = [seed for name, _, seed in calls if name == "ours"]
    assert set(seeds) == {seed for name, _, seed in calls if name == "peer"}
    assert len(set(seeds)) == len(seeds), "no call repeats a prompt"


def test_marks_hold_every_decode_and_first_line_of_the_targets() -> None:
    names = {work.name for mark in TARGET_MARKS for work in workloads_of_mark(*mark)}
    assert {name for name in TARGETS if name.startswith(("decode-", "first-"))} <= names


def test_a_statistic_is_named_in_words() -> None:
    assert f"{LONG} tokens" in workloads_for("decode")[0].statistic
    assert "whole" in workloads_for("first")[0].statistic


def test_the_warm_up_has_as_many_requests_and_an_eighth_of_their_tokens() -> None:
    assert warm_up([(800, 80), (4, 1)]) == [(100, 10), (1, 1)]

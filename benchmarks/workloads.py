"""What the speed table measures: its parts, the requests of each line, and how sides take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figure_statistics import (
    LONG,
    SHORT,
    MeasuredFigure,
    time_per_token,
    whole_call_figure,
)
from benchmarks.peer_process import Lengths, PeerProcess

PARTS = ("decode", "first", "warm", "marks", "trace", "startup", "eager", "gpt2")
PEERS_BY_PART: Mapping[str, Sequence[str]] = {
    "eager": ("transformers",),
    "gpt2": ("vLLM", "transformers"),
}
"""Whom a part is measured beside, if not vLLM alone."""
DECODE_WORKLOADS = {
    "decode": ((1, 128), (1, 4096), (8, 1024), (64, 128), (64, 1024)),
    "eager": ((1, 128),),
    "gpt2": ((1, 128), (64, 128)),
}
FIRST_TOKEN_PARTS = ("first", "warm")
TARGET_MARKS = ((1, 128), (1, 512), (1, 1024), (1, 4096), (8, 1024), (64, 1024), (64, 128))
WARM_UP_CALLS = 2
"""Calls of a side before those that count: the engine captures a prompt's graph at its second use.
"""
CALLS_PER_BLOCK = 3
"""Calls of one length that follow each other in part ``marks``."""
BLOCKS = (
    f"blocks of each side: {CALLS_PER_BLOCK} calls of {SHORT} tokens, {CALLS_PER_BLOCK} of {LONG}, "
    f"{CALLS_PER_BLOCK} of 1"
)
STATISTICS = {
    "per_token": f"(median of calls with {LONG} tokens - median with {SHORT}) / {LONG - SHORT}; "
    "spread over rounds",
    "whole": "median of whole calls; spread over rounds",
}


@dataclass(frozen=True)
class Workload:
    """One line of the table: the batch, and the outputs of the calls that make its figure."""

    name: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...] = (SHORT, LONG)
    scale: float = 1e3

    def figure(self, calls: Mapping[int, Sequence[float]]) -> MeasuredFigure:
        """Seconds by output length become the figure, by the one rule for all sides."""
        if len(self.outputs) == 2:
            return time_per_token(calls[SHORT], calls[LONG])
        return whole_call_figure(calls[self.outputs[0]], self.scale)

    @property
    def statistic(self) -> str:
        """What the figure is, in words."""
        return STATISTICS["per_token" if len(self.outputs) == 2 else "whole"]


def workloads_for(part: str) -> list[Workload]:
    """The lines of a part whose sides take turns call by call."""
    if part == "marks":
        return []
    if part in FIRST_TOKEN_PARTS:
        return [Workload(f"{part}-{prompt}", (prompt,), (1,)) for prompt in (1024, 4096)]
    return [
        Workload(f"{part}-{batch}x{prompt}", (prompt,) * batch)
        for batch, prompt in DECODE_WORKLOADS[part]
    ]


def measure_in_turn(
    work: Workload,
    sides: Sequence[PeerProcess],
    rounds: int,
    *,
    goes_on: Callable[[str, float], bool] | None = None,
    choose_rounds: Callable[[Mapping[str, float]], Mapping[str, int]] | None = None,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, MeasuredFigure]:
    """Measure a line: each round calls every side once, in rotating order; round -1 is warm-up.

    The warm-up calls each length once, and one length alone ``WARM_UP_CALLS`` times, on all sides.

    Args:
        work: the line.
        sides: opened.
        rounds: counted ones of every side.
        goes_on: whether a side takes part, by its name and about the seconds of one round, as its
            first call tells; None: all do.
        choose_rounds: from the seconds that a round of each side will take, as the warm-up tells,
            to the rounds of each side, at most ``rounds``; a side with fewer has the first ones.
        on_round: called with (rounds done, rounds in total) behind each.

    Of two lengths each is called twice running. What a call finds depends on the one before: after
    a short call, most of which is prompts at the power limit, the clock is lower than after a long
    one, and with each length once a round it would always be the long call that pays for it.
    """
    order = [output for output in work.outputs for _ in work.outputs]
    first_calls = work.outputs * -(-WARM_UP_CALLS // len(work.outputs))
    calls: dict[str, dict[int, list[float]]] = {
        side.name: {n: [] for n in work.outputs} for side in sides
    }
    warm_up: dict[str, float] = {}
    rounds_of: Mapping[str, int] = dict.fromkeys(calls, rounds)
    turn, last = -1, rounds
    while turn < last:
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            if side.name not in calls or turn >= rounds_of[side.name]:
                continue
            for number, output in enumerate(order if turn >= 0 else first_calls):
                seed = 1000 * (2 * turn + number % 2) + output
                seconds = side.generate([(prompt, output) for prompt in work.prompts], seed)
                if turn >= 0:
                    calls[side.name][output].append(seconds)
                    continue
                warm_up[side.name] = warm_up.get(side.name, 0.0) + seconds
                round_seconds = seconds * sum(order) / output
                if number == 0 and goes_on is not None and not goes_on(side.name, round_seconds):
                    del calls[side.name], warm_up[side.name]
                    break
        if turn < 0 and choose_rounds is not None:
            longer = len(order) / len(first_calls)
            rounds_of = choose_rounds({name: longer * took for name, took in warm_up.items()})
            last = max(rounds_of.values())
        turn += 1
        if on_round is not None and turn > 0:
            on_round(turn, last)
    return {name: work.figure(values) for name, values in calls.items()}


def workloads_of_mark(batch: int, prompt: int) -> list[Workload]:
    """Return the lines of one block of ``marks``: time per token, and first tokens alone."""
    decode = Workload(f"decode-{batch}x{prompt}", (prompt,) * batch)
    return [decode, Workload(f"first-{prompt}", (prompt,), (1,))] if batch == 1 else [decode]


def measure_in_blocks(
    batch: int, prompt: int, sides: Sequence[PeerProcess], rounds: int
) -> list[tuple[Workload, dict[str, MeasuredFigure]]]:
    """Measure the lines of ``workloads_of_mark`` side by side in blocks, in the order of the marks.

    A call to warm up (before the first block: ``WARM_UP_CALLS``), then ``CALLS_PER_BLOCK`` each of
    SHORT, of LONG tokens and of one: a first token comes after answers, on a card as warm as those
    make it, not as many first tokens one after another do. Sides take turns by blocks.
    """
    calls: dict[str, dict[int, list[float]]] = {
        side.name: {n: [] for n in (SHORT, LONG, 1)} for side in sides
    }
    for turn in range(rounds):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            for number in range(1 if turn else WARM_UP_CALLS):
                side.generate([(prompt, 8)] * batch, seed=1000 * turn + number)
            for output, seconds in calls[side.name].items():
                for number in range(CALLS_PER_BLOCK):
                    seconds.append(
                        side.generate(
                            [(prompt, output)] * batch, 1000 * turn + 200 * (1 + number) + output
                        )
                    )
    return [
        (work, {name: work.figure(values) for name, values in calls.items()})
        for work in workloads_of_mark(batch, prompt)
    ]


def warm_up(lengths: Lengths) -> list[tuple[int, int]]:
    """Return the requests at an eighth of their lengths, so that all batch sizes are warmed up."""
    return [(-(-prompt // 8), -(-output // 8)) for prompt, output in lengths]


def parse_pairs(text: str) -> Iterator[tuple[int, int]]:
    """1x128,8x1024 → (1, 128), (8, 1024)."""
    for part in filter(None, text.split(",")):
        a, b = part.split("x")
        yield int(a), int(b)

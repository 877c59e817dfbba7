"""What the speed table measures: its parts, the requests of each line, and how sides take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.side import Lengths, Side
from benchmarks.statistic import LONG, SHORT, Figure, per_token, whole

PARTS = ("decode", "first", "warm", "marks", "trace", "startup", "eager", "gpt2", "cpu")
PEER_OF = {"eager": "transformers", "gpt2": "transformers"}
DECODES = {"decode": ((1, 128), (1, 4096), (8, 1024), (64, 128), (64, 1024)), "eager": ((1, 128),), "gpt2": ((1, 128),)}
FIRSTS = ("first", "warm")
MARKS = ((1, 128), (1, 512), (1, 1024), (1, 4096), (8, 1024), (64, 1024), (64, 128))
RUNNING = 3
"""Calls of one length that follow each other in part ``marks``."""
BLOCKS = f"blocks of each side: {RUNNING} calls of {SHORT} tokens, {RUNNING} of {LONG}, {RUNNING} of 1"
STATISTICS = {
    "per_token": f"(median of calls with {LONG} tokens - median with {SHORT}) / {LONG - SHORT}; spread over rounds",
    "whole": "median of whole calls; spread over rounds",
}


@dataclass(frozen=True)
class Work:
    """One line of the table: the batch, and the outputs of the calls that make its figure."""

    name: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...] = (SHORT, LONG)
    scale: float = 1e3

    def figure(self, calls: Mapping[int, Sequence[float]]) -> Figure:
        """Seconds by output length become the figure, by the one rule for all sides."""
        if len(self.outputs) == 2:
            return per_token(calls[SHORT], calls[LONG])
        return whole(calls[self.outputs[0]], self.scale)

    @property
    def statistic(self) -> str:
        """What the figure is, in words."""
        return STATISTICS["per_token" if len(self.outputs) == 2 else "whole"]


def works_of(part: str) -> list[Work]:
    """The lines of a part whose sides take turns call by call."""
    if part == "marks":
        return []
    if part in FIRSTS:
        return [Work(f"{part}-{prompt}", (prompt,), (1,)) for prompt in (1024, 4096)]
    return [Work(f"{part}-{batch}x{prompt}", (prompt,) * batch) for batch, prompt in DECODES[part]]


def in_turn(work: Work, sides: Sequence[Side], rounds: int) -> dict[str, Figure]:
    """Measure a line: each round every side once, another one first each time; round -1 only warms up.

    Of two lengths each is called twice running. What a call finds depends on the one before: after a short call, most
    of which is prompts at the power limit, the clock is lower than after a long one, and with each length once a round
    it would always be the long call that pays for it.
    """
    order = [output for output in work.outputs for _ in work.outputs]
    calls: dict[str, dict[int, list[float]]] = {side.name: {n: [] for n in work.outputs} for side in sides}
    for turn in range(-1, rounds):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            for number, output in enumerate(order if turn >= 0 else work.outputs):
                seed = 1000 * (2 * turn + number % 2) + output
                seconds = side.generate([(prompt, output) for prompt in work.prompts], seed)
                if turn >= 0:
                    calls[side.name][output].append(seconds)
    return {name: work.figure(found) for name, found in calls.items()}


def marks_of(batch: int, prompt: int) -> list[Work]:
    """The lines that one block of part ``marks`` gives: the time per token, and alone the first token as well."""
    decode = Work(f"decode-{batch}x{prompt}", (prompt,) * batch)
    return [decode, Work(f"first-{prompt}", (prompt,), (1,))] if batch == 1 else [decode]


def in_blocks(batch: int, prompt: int, sides: Sequence[Side], rounds: int) -> list[tuple[Work, dict[str, Figure]]]:
    """The lines of ``marks_of``, each side by itself, in the order in which vLLM's marks of the table were taken.

    A call to warm up, then RUNNING calls each of SHORT, of LONG tokens and of one: a first token comes after answers,
    on a card as warm as those make it, not as many first tokens one after another do. Sides take turns by blocks.
    """
    calls: dict[str, dict[int, list[float]]] = {side.name: {n: [] for n in (SHORT, LONG, 1)} for side in sides}
    for turn in range(rounds):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            side.generate([(prompt, 8)] * batch, seed=1000 * turn)
            for output, seconds in calls[side.name].items():
                for number in range(RUNNING):
                    seconds.append(side.generate([(prompt, output)] * batch, 1000 * turn + 200 * (1 + number) + output))
    return [(work, {name: work.figure(found) for name, found in calls.items()}) for work in marks_of(batch, prompt)]


def warm_up(lengths: Lengths) -> list[tuple[int, int]]:
    """The requests at an eighth of their lengths: every batch size on the way down has then been seen once."""
    return [(-(-prompt // 8), -(-output // 8)) for prompt, output in lengths]


def pairs(text: str) -> Iterator[tuple[int, int]]:
    """1x128,8x1024 → (1, 128), (8, 1024)."""
    for part in filter(None, text.split(",")):
        a, b = part.split("x")
        yield int(a), int(b)

"""Decode speed of SmolLM2 on this CPU, side by side with transformers."""

from __future__ import annotations

import statistics
from typing import Any

from tools.verify.context import Context
from tools.verify.result import Fact, Result, of

TITLE = "SmolLM2 decodes at 100 tokens/s or more on 2 CPU cores"
PROMISED, ROUNDS, TOKENS = 100.0, 5, 128
CORES = 2
RECIPES = (("bfloat16", "int8"), ("float32", "int8"))


def run(context: Context) -> Result:
    """Both in one process, round by round, each after a short prompt; medians."""
    import torch

    from modelmill.eval.subjects import EngineSubject, HfSubject
    from modelmill.eval.texts import Work

    engines = {f"modelmill, {dtype} with int8 weights": context.llm(dtype, recipe) for dtype, recipe in RECIPES}
    first = next(iter(engines.values()))
    ids = first.chat_format.encode([{"role": "user", "content": "What is a watermill?"}])
    work = [Work(tuple(ids), TOKENS)]
    subjects: dict[str, Any] = {name: EngineSubject(llm.loop, name) for name, llm in engines.items()}
    other = "transformers, bfloat16"
    subjects[other] = HfSubject(context.reference("bfloat16"), 1, other)
    torch.set_num_threads(CORES)
    speeds: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(-1, ROUNDS):
        for name, subject in subjects.items():
            took = subject.run(work)
            if number >= 0:  # the round before the first warms up
                speeds[name].append((took.output_tokens - 1) / (took.total - took.first))
        context.log("  " + ", ".join(f"{name}: {values[-1]:.1f}" for name, values in speeds.items() if values))
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(engines, key=lambda name: middle[name])
    rows = [Fact(f"{best}: ≥ {PROMISED:g} tokens/s", _told(speeds[best]), middle[best] >= PROMISED)]
    rows += [Fact(name, _told(values), None) for name, values in speeds.items() if name != best]
    rows.append(Fact("speed-up over transformers", f"{middle[best] / middle[other]:.2f}×", None))
    accepted = [llm.loop.artifact.acceptance()["accepted"] for llm in engines.values()]
    rows.append(
        Fact("the recipes measured passed acceptance", f"{accepted.count(True)} of {len(accepted)}", all(accepted))
    )
    notes = [
        f"Batch 1, {len(ids)} prompt tokens, {TOKENS} tokens, greedy, end of text ignored; tokens per second after the "
        f"first token; median of {ROUNDS} rounds in which the subjects take turns, after one round of warm-up; "
        f"{CORES} threads."
    ]
    return of(rows, notes)


def _told(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} tokens/s (rounds {min(values):.1f} to {max(values):.1f})"

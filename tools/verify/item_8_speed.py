"""Decode speed of SmolLM2 on this CPU, side by side with transformers."""

from __future__ import annotations

import statistics

from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "SmolLM2 decodes at 100 tokens/s or more on 2 CPU cores"
TARGET_TOKENS_PER_S, ROUNDS, TOKENS = 100.0, 5, 128
CORES = 2
RECIPES = (("bfloat16", "int8"), ("float32", "int8"))


def run(context: VerifyContext) -> VerifyResult:
    """Both in one process, round by round, each after a short prompt; medians."""
    import torch

    from modelmill.eval.bench_targets import BenchTarget, EngineTarget, HfTarget
    from modelmill.eval.datasets import BenchRequest

    engines = {
        f"modelmill, {dtype} with int8 weights": context.llm(dtype, recipe)
        for dtype, recipe in RECIPES
    }
    first = next(iter(engines.values()))
    ids = first.chat_format.encode([{"role": "user", "content": "What is a watermill?"}])
    work = [BenchRequest(tuple(ids), TOKENS)]
    subjects: dict[str, BenchTarget] = {
        name: EngineTarget(llm.engine_core, name) for name, llm in engines.items()
    }
    other = "transformers, bfloat16"
    subjects[other] = HfTarget(context.reference("bfloat16"), 1, other)
    torch.set_num_threads(CORES)
    speeds: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(-1, ROUNDS):
        for name, subject in subjects.items():
            took = subject.run(work)
            if number >= 0:  # the round before the first warms up
                speeds[name].append(
                    (took.output_tokens - 1) / (took.total_seconds - took.first_token_seconds)
                )
        context.log(
            "  "
            + ", ".join(f"{name}: {values[-1]:.1f}" for name, values in speeds.items() if values)
        )
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(engines, key=lambda name: middle[name])
    rows = [
        Fact(
            f"{best}: ≥ {TARGET_TOKENS_PER_S:g} tokens/s",
            _format_speeds(speeds[best]),
            middle[best] >= TARGET_TOKENS_PER_S,
        )
    ]
    rows += [
        Fact(name, _format_speeds(values), None) for name, values in speeds.items() if name != best
    ]
    rows.append(Fact("speed-up over transformers", f"{middle[best] / middle[other]:.2f}×", None))
    accepted = [
        llm.engine_core.artifact.acceptance_report()["accepted"] for llm in engines.values()
    ]
    rows.append(
        Fact(
            "the recipes measured passed acceptance",
            f"{accepted.count(True)} of {len(accepted)}",
            all(accepted),
        )
    )
    notes = [
        f"Batch 1, {len(ids)} prompt tokens, {TOKENS} tokens, greedy, end of text ignored; tokens "
        "per second after the "
        f"first token; median of {ROUNDS} rounds in which the subjects take turns, after one "
        "round of warm-up; "
        f"{CORES} threads."
    ]
    return make_result(rows, notes)


def _format_speeds(values: list[float]) -> str:
    return (
        f"{statistics.median(values):.1f} tokens/s (rounds {min(values):.1f} to {max(values):.1f})"
    )

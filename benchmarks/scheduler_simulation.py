"""Simulate how long a batch takes with the current scheduler and step costs of one H200.

    python benchmarks/scheduler_simulation.py 64x1024+144 64x1024+16 [--trace azure]

No GPU, no model: for judging an order of service before it is measured. Qwen-7B's shape in
bfloat16; what a step costs was read off steps of the trace (``trace_steps.py``). The trace takes
27.6 s here and took 27.3 to 28.1 s on a card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trace_file  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.runtime.kv_pages import PagePool  # noqa: E402
from modelmill.runtime.scheduler import Schedule, Scheduler, SchedulerLimits  # noqa: E402
from modelmill.runtime.sequence import RopeFrequencyRule  # noqa: E402
from modelmill.runtime.sequence import Sequence as Row  # noqa: E402

Lengths = Sequence[tuple[int, int]]
MAX_MIXED_TOKENS, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, PAGE_SIZE, NUM_PAGES = 768, 8192, 256, 16, 13855
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {"max_mixed_tokens": MAX_MIXED_TOKENS, "prefill_all_first": True},
    "always in pieces": {"max_mixed_tokens": MAX_MIXED_TOKENS},
    "never in pieces": {"max_mixed_tokens": None},
}


@dataclass(frozen=True)
class StepCost:
    """Cost model of a step, in milliseconds.

    weights: reading all of them once; row: per row of a step without prompts; token: the GEMMs of
    one token, where they dominate; key: a token's keys and values in all layers, read once;
    attended_key_ms: attention and other kernels per token of a prompt.
    """

    weights: float = 3.9
    row: float = 0.003
    token: float = 0.0209
    key: float = (2 * 32 * 4096 * 2) / 4.2e9
    attended_key_ms: float = 0.0009

    def step_ms(self, plan: Schedule) -> float:
        """The whole of a step, before its tokens count as computed."""
        singles = [seq.computed + 1 for seq, count in plan.work if count == 1]
        prompts = plan.num_tokens - len(singles)
        products = max(self.weights + 1.0, plan.num_tokens * self.token)
        if not prompts:
            products = self.weights + self.row * min(len(singles), MAX_NUM_SEQS)
        return products + sum(singles) * self.key + prompts * self.attended_key_ms


def simulate_seconds(
    lengths: Lengths, cost: StepCost, pages: int = NUM_PAGES, **limits: Any
) -> float:
    """Of a batch that is handed in at once, the longest answers first.

    limits: fields of ``Limits``.
    """
    scheduler = Scheduler(
        SchedulerLimits(
            MAX_BATCHED_TOKENS, MAX_NUM_SEQS, PAGE_SIZE, prefix_caching=False, **limits
        ),
        PagePool(pages),
        1 << 12,
    )
    rule = RopeFrequencyRule("fixed", lambda _: 0)
    for number, (prompt, answer) in enumerate(sorted(lengths, key=lambda pair: -pair[1])):
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        request = Request(id=str(number), prompt=(5,) * prompt, params=params)
        scheduler.add(Row(request, 0, number, rule, max_length=prompt + answer))
    return sum(cost.step_ms(plan) for plan in iter_steps(scheduler)) / 1e3


def iter_steps(scheduler: Scheduler) -> Iterator[Schedule]:
    """Yield the steps until all requests end, each before its tokens count as computed.

    Every answer runs to its limit.
    """
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        assert plan is not None
        yield plan
        scheduler.update_after_launch(plan)
        for seq in [seq for seq, _ in plan.work if seq.pending]:
            seq.tokens.append(5)
            seq.pending = 0
            if len(seq.tokens) >= seq.max_length:
                scheduler.remove(seq)


def parse_batch(text: str) -> Lengths:
    """64x1024+144: so many requests of so many tokens, with answers of so many.

    Raises ValueError for another text.
    """
    size, _, answer = text.partition("+")
    count, _, prompt = size.partition("x")
    return [(int(prompt), int(answer))] * int(count)


def main() -> None:
    """Print a line a batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("batches", nargs="*", metavar="COUNTxPROMPT+ANSWER")
    parser.add_argument("--trace", type=trace_file.parse_trace, help=trace_file.HELP)
    parser.add_argument("--requests", type=int, default=500, help="of the trace")
    options = parser.parse_args()
    works = {spec: parse_batch(spec) for spec in options.batches}
    if options.trace is not None:
        from modelmill.eval.datasets import sample_request_lengths

        works[f"{options.requests} of the trace"] = sample_request_lengths(
            options.trace, options.requests
        )
    if not works:
        parser.error("no batch: name one, as 64x1024+144, or --trace azure")
    print(f"{'seconds':24}" + "".join(f"{name:>20}" for name in POLICIES))
    for name, lengths in works.items():
        print(
            f"{name:24}"
            + "".join(
                f"{simulate_seconds(lengths, StepCost(), **fields):20.3f}"
                for fields in POLICIES.values()
            )
        )


if __name__ == "__main__":
    main()

"""Which launch sizes make a whole step faster: the search, which knows nothing of GPUs.

One product at a time changes its sizes while the others keep theirs, and the step as a whole is
timed: kernels overlap their neighbours, so that the best tile by itself need not be the best one
there. What does not clearly win keeps its default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelmill.ops.launch_configs import GemmKey, TunedConfigs

MIN_GEMM_GAIN = 0.015  # of the product's own time
MIN_STEP_GAIN = 0.002  # of the step's: below lies the clock's noise

StepTimer = Callable[[Sequence[TunedConfigs]], list[float | None]]
"""Seconds of a step with each of some choices, timed in turn; None for one that cannot run here."""


@dataclass(frozen=True)
class TunableGemm:
    """A product of a step. time_share: its part of the step's time, by the bytes of its weight.
    launch_configs: to be tried.
    """

    op: str
    key: GemmKey
    time_share: float
    launch_configs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AutotuneOutcome:
    """choices: what won. default_seconds, tuned_seconds: of a step, raced at the end. num_untried:
    products left undone.
    """

    choices: TunedConfigs
    default_seconds: float | None
    tuned_seconds: float | None
    num_untried: int = 0


def search_launch_configs(
    gemms: Sequence[TunableGemm], time_steps: StepTimer, now: Callable[[], float], deadline: float
) -> AutotuneOutcome:
    """Try each product's sizes, those with the largest share first, as long as
    ``now() < deadline``.

    A winner must win twice, and all of them together clearly once more against the defaults.
    """
    best: TunedConfigs = {}
    untried = 0
    for product in sorted(gemms, key=lambda each: -each.time_share):
        if now() >= deadline:
            untried += 1
            continue
        options = [with_launch_config(best, product, sizes) for sizes in product.launch_configs]
        base, *times = time_steps([best, *options])
        ran = [(seconds, index) for index, seconds in enumerate(times) if seconds is not None]
        if base is None or not ran:
            continue
        quickest, index = min(ran)
        if is_clearly_faster(base, quickest, product.time_share) and _wins_again(
            time_steps, best, options[index], product.time_share
        ):
            best = options[index]
    default, tuned = time_steps([{}, best]) if best else (None, None)
    if default is None or tuned is None or not is_clearly_faster(default, tuned, 0.0):
        return AutotuneOutcome({}, default, default, untried)
    return AutotuneOutcome(best, default, tuned, untried)


def _wins_again(
    time_steps: StepTimer, best: TunedConfigs, candidate: TunedConfigs, time_share: float
) -> bool:
    base, seconds = time_steps([best, candidate])
    return base is not None and seconds is not None and is_clearly_faster(base, seconds, time_share)


def is_clearly_faster(base: float, seconds: float, time_share: float) -> bool:
    """Whether a step of ``seconds`` beats ``base`` by more than chance, where the product has this
    share of it.
    """
    return (base - seconds) / base > max(MIN_GEMM_GAIN * time_share, MIN_STEP_GAIN)


def with_launch_config(
    choices: TunedConfigs, gemm: TunableGemm, launch_config: tuple[int, ...]
) -> TunedConfigs:
    """The choices with one product's sizes in their place."""
    return {**choices, gemm.op: {**choices.get(gemm.op, {}), gemm.key: launch_config}}

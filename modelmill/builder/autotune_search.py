"""Searches the launch configs that make a whole step faster; independent of GPUs.

One GEMM at a time changes its config while the others keep theirs, and the whole step is timed:
kernels overlap their neighbours, so the tile that is best alone need not be the best in the step.
Without a clear gain, a GEMM keeps its default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelmill.ops.launch_configs import GemmKey, TunedConfigsByOp

MIN_GEMM_GAIN = 0.015  # of the GEMM's own time
MIN_STEP_GAIN = 0.002  # of the step's time: smaller differences are timer noise

InterleavedStepTimer = Callable[[Sequence[TunedConfigsByOp]], list[float | None]]
"""Seconds of a step with each of some choices, timed interleaved; None for one that cannot run
here.
"""


@dataclass(frozen=True)
class TunableGemm:
    """A GEMM of a step.

    Attributes:
        time_share: its share of the step's time, by the bytes of its weight.
        launch_configs: configs to try.
    """

    op: str
    key: GemmKey
    time_share: float
    launch_configs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AutotuneOutcome:
    """Result of a search.

    Attributes:
        choices: the winning configs.
        default_seconds: of a step, timed at the end.
        tuned_seconds: likewise.
        num_untried: GEMMs that were not tried in time.
    """

    choices: TunedConfigsByOp
    default_seconds: float | None
    tuned_seconds: float | None
    num_untried: int = 0


def search_launch_configs(
    gemms: Sequence[TunableGemm],
    time_steps: InterleavedStepTimer,
    now: Callable[[], float],
    deadline: float,
) -> AutotuneOutcome:
    """Try the configs of each GEMM, largest time share first, while ``now() < deadline``.

    A winner must win twice, and all winners together must clearly beat the defaults once more.
    """
    best: TunedConfigsByOp = {}
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
        if is_clearly_faster(base, quickest, product.time_share) and _confirm_faster(
            time_steps, best, options[index], product.time_share
        ):
            best = options[index]
    default, tuned = time_steps([{}, best]) if best else (None, None)
    if default is None or tuned is None or not is_clearly_faster(default, tuned, 0.0):
        return AutotuneOutcome({}, default, default, untried)
    return AutotuneOutcome(best, default, tuned, untried)


def _confirm_faster(
    time_steps: InterleavedStepTimer,
    best: TunedConfigsByOp,
    candidate: TunedConfigsByOp,
    time_share: float,
) -> bool:
    base, seconds = time_steps([best, candidate])
    return base is not None and seconds is not None and is_clearly_faster(base, seconds, time_share)


def is_clearly_faster(base: float, seconds: float, time_share: float) -> bool:
    """Return whether ``seconds`` of a step beat ``base`` by more than noise.

    time_share: the GEMM's share of the step's time.
    """
    return (base - seconds) / base > max(MIN_GEMM_GAIN * time_share, MIN_STEP_GAIN)


def with_launch_config(
    choices: TunedConfigsByOp, gemm: TunableGemm, launch_config: tuple[int, ...]
) -> TunedConfigsByOp:
    """Return the choices with one GEMM's config replaced."""
    return {**choices, gemm.op: {**choices.get(gemm.op, {}), gemm.key: launch_config}}

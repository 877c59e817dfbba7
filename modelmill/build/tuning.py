"""Which launch sizes make a whole step faster: the search, which knows nothing of GPUs.

One product at a time changes its sizes while the others keep theirs, and the step as a whole is timed: kernels overlap
their neighbours, so that the best tile by itself need not be the best one there. What does not clearly win keeps its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelmill.ops.tuning import Choices, Key

LEAST_GAIN = 0.015  # of the product's own time
LEAST_STEP = 0.002  # of the step's: below lies the clock's noise

Race = Callable[[Sequence[Choices]], list[float | None]]
"""Seconds of a step with each of some choices, timed in turn; None for one that cannot run here."""


@dataclass(frozen=True)
class Product:
    """A product of a step. share: its part of the step's time, by the bytes of its weight. sizes: to be tried."""

    op: str
    key: Key
    share: float
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """choices: what won. default, tuned: seconds of a step, raced at the end. untried: products left undone."""

    choices: Choices
    default: float | None
    tuned: float | None
    untried: int = 0


def search(products: Sequence[Product], race: Race, now: Callable[[], float], until: float) -> Outcome:
    """Try each product's sizes, those with the largest share first, as long as ``now() < until``.

    A winner must win twice, and all of them together clearly once more against the defaults.
    """
    best: Choices = {}
    untried = 0
    for product in sorted(products, key=lambda each: -each.share):
        if now() >= until:
            untried += 1
            continue
        options = [changed(best, product, sizes) for sizes in product.sizes]
        base, *times = race([best, *options])
        ran = [(seconds, index) for index, seconds in enumerate(times) if seconds is not None]
        if base is None or not ran:
            continue
        quickest, index = min(ran)
        if clearly(base, quickest, product.share) and _again(race, best, options[index], product.share):
            best = options[index]
    default, tuned = race([{}, best]) if best else (None, None)
    if default is None or tuned is None or not clearly(default, tuned, 0.0):
        return Outcome({}, default, default, untried)
    return Outcome(best, default, tuned, untried)


def _again(race: Race, best: Choices, option: Choices, share: float) -> bool:
    base, seconds = race([best, option])
    return base is not None and seconds is not None and clearly(base, seconds, share)


def clearly(base: float, seconds: float, share: float) -> bool:
    """Whether a step of ``seconds`` beats ``base`` by more than chance, where the product has this share of it."""
    return (base - seconds) / base > max(LEAST_GAIN * share, LEAST_STEP)


def changed(choices: Choices, product: Product, sizes: tuple[int, ...]) -> Choices:
    """The choices with one product's sizes in their place."""
    return {**choices, product.op: {**choices.get(product.op, {}), product.key: sizes}}

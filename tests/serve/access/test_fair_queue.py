"""Weighted fair queueing: shares of the tokens, order, idle keys."""

from __future__ import annotations

from collections import Counter

import pytest

from modelmill.serve.access.fair_queue import FairQueueClock, TokenCharge


def serve_in_order(queue: FairQueueClock, charges: list[TokenCharge], count: int) -> list[str]:
    """Start so many requests, lowest virtual start first; those that arrived first win ties."""
    order = sorted(charges, key=lambda charge: charge.start)[:count]
    for charge in order:
        queue.advance_virtual_time(charge.start)
        charges.remove(charge)
    return [charge.flow for charge in order]


@pytest.mark.parametrize(
    ("weights", "tokens", "shares"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 100, "b": 100}, {"a": 30, "b": 30}),
        ({"a": 2.0, "b": 1.0}, {"a": 100, "b": 100}, {"a": 40, "b": 20}),
        # equal shares of the tokens, not of the requests
        ({"a": 1.0, "b": 1.0}, {"a": 100, "b": 200}, {"a": 40, "b": 20}),
    ],
)
def test_keys_get_tokens_by_their_weights(
    weights: dict[str, float], tokens: dict[str, int], shares: dict[str, int]
) -> None:
    queue = FairQueueClock()
    charges = [
        queue.assign_virtual_start(flow, weights[flow], tokens[flow])
        for flow in ("a", "b")
        for _ in range(60)
    ]
    served = Counter(serve_in_order(queue, charges, 60))
    assert all(abs(served[flow] - share) <= 1 for flow, share in shares.items()), served


def test_a_flood_of_one_key_does_not_delay_another() -> None:
    queue = FairQueueClock()
    charges = [queue.assign_virtual_start("flood", 1.0, 100) for _ in range(50)]
    assert serve_in_order(queue, charges, 5) == ["flood"] * 5
    charges.append(queue.assign_virtual_start("other", 1.0, 100))
    assert "other" in serve_in_order(queue, charges, 2)


def test_an_idle_key_saves_nothing_up() -> None:
    queue = FairQueueClock()
    charges = [queue.assign_virtual_start("a", 1.0, 100) for _ in range(20)]
    serve_in_order(queue, charges, 20)
    charges = [queue.assign_virtual_start(flow, 1.0, 100) for flow in ("a", "b") for _ in range(10)]
    assert serve_in_order(queue, charges, 10).count("b") <= 6


def test_requests_of_one_key_keep_their_order_whatever_they_took() -> None:
    queue = FairQueueClock()
    first = queue.assign_virtual_start("a", 1.0, 500)
    second = queue.assign_virtual_start("a", 1.0, 500)
    queue.settle_charge(first, 0)
    queue.settle_charge(second, 10)
    third = queue.assign_virtual_start("a", 1.0, 500)
    assert first.start < second.start <= third.start
    assert third.start < second.start + 500, "what was not used does not count"

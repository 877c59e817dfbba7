"""Limits of a key, by a clock that the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.serve.access.key_limits import KeyLimitReached, KeyUsage
from modelmill.serve.access.key_policy import KeyPolicy


class Clock:
    """A clock that stands still."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def usage(clock: Clock, **limits: Any) -> KeyUsage:
    return KeyUsage(KeyPolicy("team", "k", **limits), clock=clock)


def refusal(used: KeyUsage) -> tuple[str, int]:
    """The message and seconds of a refused request."""
    with pytest.raises(KeyLimitReached) as raised:
        used.admit_request()
    return str(raised.value), raised.value.retry_after


def test_requests_in_any_minute() -> None:
    clock = Clock()
    used = usage(clock, requests_per_minute=2)
    used.admit_request()
    clock.now += 20
    used.admit_request()
    assert refusal(used) == (
        "the key team may use 2 requests a minute; try again in 40 s",
        40,
    )
    clock.now += 40
    used.admit_request()
    assert refusal(used)[1] == 20


def test_tokens_in_any_minute() -> None:
    clock = Clock()
    used = usage(clock, tokens_per_minute=100, requests_per_minute=5)
    for tokens in (60, 60):
        used.admit_request()
        used.end_request(tokens)
        clock.now += 10
    for _ in range(9):  # a refused request does not count
        assert refusal(used) == (
            "the key team may use 100 tokens a minute; try again in 40 s",
            40,
        )
    clock.now += 40
    used.admit_request()


def test_requests_at_once() -> None:
    used = usage(Clock(), max_parallel_requests=1)
    used.admit_request()
    assert refusal(used) == ("the key team may use 1 requests at once; try again in 1 s", 1)
    used.end_request(5)
    used.admit_request()

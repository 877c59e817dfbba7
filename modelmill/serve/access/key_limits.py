"""Limits of an API key: requests and tokens in any minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from modelmill.core.errors import CapacityError
from modelmill.serve.access.key_policy import KeyPolicy
from modelmill.serve.prometheus_helpers import make_counter

WINDOW_SECONDS = 60.0
REFUSING_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_parallel_requests")


class KeyLimitReached(CapacityError):
    """A limit of the request's key is reached.

    Attributes:
        retry_after: seconds until a request may be accepted.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyMetrics:
    """Tokens and refusals of each key."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = make_counter(
            registry, "key_tokens", "Prompt and generated tokens of a key's requests.", "key_name"
        )
        self._refusals = make_counter(
            registry,
            "key_refusals",
            "Requests that a limit of their key refused.",
            "key_name",
            "limit",
        )

    def add_key(self, name: str) -> None:
        """Show a key before its first request."""
        self._tokens.labels(name)
        for limit in REFUSING_LIMITS:
            self._refusals.labels(name, limit)

    def count_tokens(self, name: str, tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        self._tokens.labels(name).inc(tokens)

    def count_refusal(self, name: str, limit: str) -> None:
        """Count a refused request."""
        self._refusals.labels(name, limit).inc()


class KeyUsage:
    """The requests of one key in the last minute, and those that run or wait."""

    def __init__(
        self,
        policy: KeyPolicy,
        metrics: KeyMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without requests.

        Args:
            policy: of the key.
            metrics: to count in; None: not counted.
            clock: seconds.
        """
        self.policy = policy
        self._metrics, self._clock = metrics, clock
        self._parallel = 0
        self._requests: deque[float] = deque()
        self._tokens: deque[tuple[float, int]] = deque()
        self._num_tokens = 0

    def admit_request(self) -> None:
        """Count a request that begins.

        Raises:
            KeyLimitReached: it would exceed a limit.
        """
        policy, now = self.policy, self._clock()
        self._drop_expired(now)
        parallel, requests = policy.max_parallel_requests, policy.requests_per_minute
        if parallel is not None and self._parallel >= parallel:
            raise self._count_refusal_and_make_error(
                "max_parallel_requests", "requests at once", 1.0
            )
        if requests is not None and len(self._requests) >= requests:
            wait = self._requests[0] + WINDOW_SECONDS - now
            raise self._count_refusal_and_make_error(
                "requests_per_minute", "requests a minute", wait
            )
        if policy.tokens_per_minute is not None and self._num_tokens >= policy.tokens_per_minute:
            raise self._count_refusal_and_make_error(
                "tokens_per_minute", "tokens a minute", self._seconds_until_tokens_allowed(now)
            )
        if requests is not None:
            self._requests.append(now)
        self._parallel += 1

    def end_request(self, tokens: int) -> None:
        """Count the end of a request that has begun.

        Args:
            tokens: of its prompts and outputs.
        """
        self._parallel -= 1
        if self._metrics is not None:
            self._metrics.count_tokens(self.policy.name, tokens)
        if self.policy.tokens_per_minute is not None and tokens:
            self._tokens.append((self._clock(), tokens))
            self._num_tokens += tokens

    def _drop_expired(self, now: float) -> None:
        """Forget what is more than a minute old."""
        while self._requests and self._requests[0] <= now - WINDOW_SECONDS:
            self._requests.popleft()
        while self._tokens and self._tokens[0][0] <= now - WINDOW_SECONDS:
            self._num_tokens -= self._tokens.popleft()[1]

    def _seconds_until_tokens_allowed(self, now: float) -> float:
        """Seconds until the tokens of the last minute are fewer than the limit."""
        left = self._num_tokens
        for at, tokens in self._tokens:
            left -= tokens
            if left < (self.policy.tokens_per_minute or 0):
                return at + WINDOW_SECONDS - now
        return WINDOW_SECONDS

    def _count_refusal_and_make_error(
        self, limit: str, unit: str, seconds: float
    ) -> KeyLimitReached:
        if self._metrics is not None:
            self._metrics.count_refusal(self.policy.name, limit)
        wait = max(math.ceil(seconds), 1)
        return KeyLimitReached(
            f"the key {self.policy.name} may use {getattr(self.policy, limit)} {unit}; try again "
            f"in {wait} s",
            wait,
        )

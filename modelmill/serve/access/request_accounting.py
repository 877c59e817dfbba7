"""What one HTTP request uses of its key's limits and share, from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.core.errors import RequestError
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.access.fair_queue import MAX_EXPECTED_OUTPUT, FairQueueClock, TokenCharge
from modelmill.serve.access.key_limits import KeyUsage
from modelmill.serve.access.key_policy import KeyPolicy

NO_POLICY = KeyPolicy("", "", may_raise_priority=True)
"""Of a server without keys: one queue in order of priority and arrival, no limits."""


class RequestAccounting:
    """A request of a key; ``settle_usage`` counts what it took."""

    def __init__(self, policy: KeyPolicy, usage: KeyUsage | None, priority: int | None) -> None:
        """Begin a request.

        Args:
            policy: of its key.
            usage: of its key; None: the key has no limits.
            priority: the field of the request; None: not sent.

        Raises:
            KeyLimitReached: a limit of the key is reached.
            RequestError: the key may not send this priority.
        """
        if priority is not None and priority < 0 and not policy.may_raise_priority:
            raise RequestError("priority must be at least 0 for this key")
        if usage is not None:
            usage.admit_request()
        self._policy, self._usage = policy, usage
        self._priority = policy.priority + (priority or 0)
        self._charges: list[tuple[TokenCharge, RequestOutputState]] = []
        self._queue: FairQueueClock | None = None

    def set_queue_order(
        self, queue: FairQueueClock, request_states: Sequence[RequestOutputState]
    ) -> None:
        """Set priority and virtual start of the requests of prompts, before they are queued."""
        self._queue = queue
        for state in request_states:
            start = 0.0
            if self._policy is not NO_POLICY:
                charge = queue.assign_virtual_start(
                    self._policy.name, self._policy.weight, _expected_tokens(state)
                )
                self._charges.append((charge, state))
                start = charge.start
            if self._priority or start:
                state.set_queue_order(self._priority, start)

    def settle_usage(self) -> None:
        """Count the tokens of the request, whether it has finished or not."""
        total = 0
        for charge, state in self._charges:
            tokens = used_tokens(state)
            total += tokens
            if self._queue is not None:
                self._queue.settle_charge(charge, tokens)
        if self._usage is not None:
            self._usage.end_request(total)


def used_tokens(state: RequestOutputState) -> int:
    """Prompt and output tokens; 0 for a prompt that was never computed."""
    return state.prompt_tokens + sum(len(each.token_ids) for each in state.output.outputs)


def _expected_tokens(state: RequestOutputState) -> int:
    params = state.request.params
    output = MAX_EXPECTED_OUTPUT if params.max_tokens is None else params.max_tokens
    return len(state.request.prompt) + params.n * min(output, MAX_EXPECTED_OUTPUT)

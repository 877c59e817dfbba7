"""The server's side of generation: requests that one worker runs, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelmill.core.errors import GRAMMAR_TOO_COSTLY_MESSAGE, CapacityError, RequestError
from modelmill.core.types import FinishReason, TokenOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.access.fair_queue import FairQueueClock
from modelmill.serve.engine_state import QueueFull
from modelmill.serve.metrics import EngineMetrics
from modelmill.serve.request_handle import HttpRequestHandle
from modelmill.serve.worker_messages import (
    AbortRequest,
    FinishSequence,
    Message,
    RequestRejected,
    RequestStarted,
    StepTokens,
)


class GenerationClient:
    """Requests that wait or run in one worker.

    Attributes:
        active_requests: By id, those that are not finished.
        num_sequences: Of all of them together.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[Message], None],
        write: Callable[[bytes], None],
        capacity: Callable[[], int],
        fair_queue: FairQueueClock,
    ) -> None:
        """Start without a request.

        Args:
            name: served name of the engine.
            send: sends a message to the worker.
            write: sends an encoded message.
            capacity: sequences that may run and wait together now.
            fair_queue: learns which requests have started.
        """
        self.active_requests: dict[str, tuple[RequestOutputState, HttpRequestHandle]] = {}
        self.num_sequences = 0
        self._name, self._capacity, self._fair_queue = name, capacity, fair_queue
        self._send, self._write = send, write
        self._metrics: EngineMetrics | None = None

    def set_metrics(self, metrics: EngineMetrics) -> None:
        """Count requests and tokens in these metrics from now on."""
        self._metrics = metrics

    def check_capacity(self, num_sequences: int) -> None:
        """Check whether so many sequences could be queued now, before the prompts are processed.

        Raises:
            RequestError: the server never queues so many.
            QueueFull: the queue has no room now.
        """
        capacity = self._capacity()
        if num_sequences > capacity:
            raise RequestError(
                f"{num_sequences} sequences in one request are more than the {capacity} that "
                "this server queues"
            )
        if self.num_sequences + num_sequences > capacity:
            raise QueueFull(
                f"the engine {self._name} has {self.num_sequences} sequences in its queue; try "
                "again soon"
            )

    def submit(
        self, request_states: Sequence[RequestOutputState], frames: Sequence[bytes]
    ) -> HttpRequestHandle:
        """Queue requests, all or none.

        Args:
            request_states: one per prompt.
            frames: their encoded messages.

        Raises:
            RequestError: the server never queues so many sequences.
            QueueFull: too many sequences wait.
        """
        handle = HttpRequestHandle(request_states, self._abort_requests)
        self.check_capacity(handle.num_sequences)
        for state, frame in zip(request_states, frames, strict=True):
            self.active_requests[state.request.id] = state, handle
            self.num_sequences += state.request.params.n
            self._write(frame)
        return handle

    def fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        for _, handle in list(self.active_requests.values()):
            handle.fail(error)

    def clear(self) -> None:
        """Forget all requests: the worker is gone."""
        self.active_requests.clear()
        self.num_sequences = 0

    def handle_message(self, message: StepTokens | RequestStarted | RequestRejected) -> None:
        """Take a message of the worker."""
        if isinstance(message, StepTokens):
            for token in message.tokens:
                self.on_token(token)
        elif isinstance(message, RequestStarted):
            self._on_request_started(message)
        else:
            self._on_request_rejected(message)

    def _on_request_started(self, message: RequestStarted) -> None:
        if self._metrics is not None:
            self._metrics.observe_queue_time(message.queue_seconds)
        entry = self.active_requests.get(message.id)
        if entry is not None:
            entry[1].record_first_queue_time(message.queue_seconds)
            self._fair_queue.advance_virtual_time(entry[0].request.virtual_start)

    def _on_request_rejected(self, message: RequestRejected) -> None:
        entry = self._remove_request(message.id)
        if entry is not None:
            if self._metrics is not None:
                self._metrics.record_aborted(entry[0], "error")
            error = CapacityError if message.out_of_memory else RequestError
            entry[1].fail(error(message.message))

    def on_token(self, token: TokenOutput) -> None:
        """Hand a token to its request."""
        entry = self.active_requests.get(token.request_id)
        if entry is None:
            return
        state, handle = entry
        try:
            self._deliver_token(state, handle, token)
        except Exception as error:
            # a bug ends only this request; its route raises the error again, which logs it
            handle.fail(error)

    def _deliver_token(
        self, request_state: RequestOutputState, handle: HttpRequestHandle, token: TokenOutput
    ) -> None:
        if request_state.output.outputs[token.index].finish_reason is not None:
            # a stop string has ended it; the worker had not received FinishSequence yet
            return
        before = request_state.token_counts(token.index)
        delta, stopped = request_state.process_token_output(token)
        if self._metrics is not None:
            self._metrics.record_delta(request_state, delta, before)
        if stopped:
            self._send(FinishSequence(token.request_id, token.index))
        if request_state.output.finished:
            self._remove_request(token.request_id)
        if token.finish_reason is FinishReason.ABORT:
            handle.fail(CapacityError("the engine has no memory left for this request; shorten it"))
            return
        if token.finish_reason is FinishReason.ERROR:
            handle.fail(RequestError(GRAMMAR_TOO_COSTLY_MESSAGE))
            return
        handle.add_delta(
            token.request_id, delta, 1 + len(token.logprobs or ()) + len(token.replayed_ids or ())
        )

    def _remove_request(self, id: str) -> tuple[RequestOutputState, HttpRequestHandle] | None:
        entry = self.active_requests.pop(id, None)
        if entry is not None:
            self.num_sequences -= entry[0].request.params.n
        return entry

    def _abort_requests(self, ids: Sequence[str]) -> None:
        for id in ids:
            entry = self._remove_request(id)
            if entry is not None:
                self._send(AbortRequest(id))
                if self._metrics is not None:
                    self._metrics.record_aborted(entry[0], entry[1].aborted_metric_label)

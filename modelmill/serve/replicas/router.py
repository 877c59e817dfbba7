"""Ray Serve's request router with ``PrefixAffinity``; it runs in the proxy process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from modelmill.serve.replicas.prefix_affinity import PrefixAffinity


class PrefixAwareRouter(RequestRouter):
    """Routes requests by prefix.

    Requests have the arguments ``prefix`` (see ``prefix_digests``) and ``avoid`` (replicas on which
    they failed).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = PrefixAffinity()
        self._loads: Counter[str] = Counter()
        self._assignments: dict[str, str] = {}
        # the end of requests is reported by another thread
        self._lock = threading.Lock()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in order, each a rank of its own.

        The first counts as assigned until the actual route is reported.
        """
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [list(replicas.values())]
        arguments, id = pending_request.kwargs, pending_request.metadata.internal_request_id
        with self._lock:
            self._release_request(id)
            self._affinity.retain_replicas(list(replicas))
            candidates = [
                name for name in replicas if name not in arguments.get("avoid", ())
            ] or list(replicas)
            order = self._affinity.rank_replicas(
                arguments.get("prefix", ()), {name: self._loads[name] for name in candidates}
            )
            self._assign_request(id, order[0], arguments.get("prefix", ()))
        pending_request.future.add_done_callback(
            lambda future: self._on_request_finished(id) if future.cancelled() else None
        )
        return [[replicas[name]] for name in order]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: Any,
        result: Any,  # noqa: ARG002
    ) -> None:
        """Record which replica received the request."""
        id = pending_request.metadata.internal_request_id
        with self._lock:
            if self._assignments.get(id) != replica_id.unique_id:
                self._release_request(id)
                self._assign_request(
                    id, replica_id.unique_id, pending_request.kwargs.get("prefix", ())
                )

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:  # noqa: ARG002
        """Record that the request has ended, successfully or not."""
        self._on_request_finished(internal_request_id)

    def _on_request_finished(self, id: str) -> None:
        with self._lock:
            self._release_request(id)

    def _assign_request(self, id: str, name: str, prefix: Any) -> None:
        self._assignments[id] = name
        self._loads[name] += 1
        self._affinity.record_route(prefix, name)

    def _release_request(self, id: str) -> None:
        name = self._assignments.pop(id, None)
        if name is not None:
            self._loads[name] -= 1
            if self._loads[name] <= 0:
                del self._loads[name]

"""What replicas serve, and where: plain data, without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelmill.serve.worker_messages import OpenEngine


@dataclass(frozen=True)
class ReplicaSpec:
    """What every replica serves. names and open_messages belong together; the rest is as the flags
    of those names.

    generation: another number makes Ray Serve replace the replicas.
    """

    names: tuple[str, ...]
    open_messages: tuple[OpenEngine, ...]
    max_waiting: int
    max_body_bytes: int
    log_level: str
    otlp_endpoint: str | None = None
    generation: int = 0
    max_text_body_bytes: int = 4 << 20

    def split_for_replicas(self, num_replicas: int) -> ReplicaSpec:
        """For one of ``num_replicas`` that load at once on one machine: each takes its part of the
        memory.
        """

        def split_memory(order: OpenEngine) -> OpenEngine:
            engines = 1 + order.num_loaded_before + len(order.later_weight_bytes)
            return replace(
                order,
                later_weight_bytes=(
                    *order.later_weight_bytes,
                    *(0,) * (engines * (num_replicas - 1)),
                ),
            )

        return replace(self, open_messages=tuple(map(split_memory, self.open_messages)))


@dataclass(frozen=True)
class DeploymentSpec:
    """tp, device: as in RunConfig. address: of a Ray cluster; None: one of our own, on this machine
    alone. drain_timeout: seconds for running answers when a replica is replaced.
    """

    num_replicas: int
    tp: int = 1
    device: str = "auto"
    address: str | None = None
    drain_timeout: float = 30.0

    def gpus_per_replica(self, cluster_gpus: float) -> int:
        """GPUs for each replica, all on one node, in a cluster that has so many."""
        return (
            self.tp if self.device == "cuda" or (self.device == "auto" and cluster_gpus > 0) else 0
        )

"""Describes replicas and their deployment: plain data, without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelmill.serve.worker_messages import OpenEngine


@dataclass(frozen=True)
class ReplicaSpec:
    """What every replica serves; fields not listed are as the flags of the same names.

    Attributes:
        names: served names, one per message of ``open_messages``.
        open_messages: how to open each engine.
        generation: a new number makes Ray Serve replace the replicas.
        aliases: (further name, name of its engine).
    """

    names: tuple[str, ...]
    open_messages: tuple[OpenEngine, ...]
    max_waiting: int
    max_body_bytes: int
    log_level: str
    otlp_endpoint: str | None = None
    generation: int = 0
    max_text_body_bytes: int = 4 << 20
    aliases: tuple[tuple[str, str], ...] = ()

    def with_memory_share(self, num_replicas: int) -> ReplicaSpec:
        """The spec for ``num_replicas`` that load at the same time on one machine.

        Each takes its share of the memory.
        """

        def split_memory(message: OpenEngine) -> OpenEngine:
            num_engines = 1 + message.num_loaded_before + len(message.later_weight_bytes)
            return replace(
                message,
                later_weight_bytes=(
                    *message.later_weight_bytes,
                    *(0,) * (num_engines * (num_replicas - 1)),
                ),
            )

        return replace(self, open_messages=tuple(map(split_memory, self.open_messages)))


@dataclass(frozen=True)
class DeploymentSpec:
    """How many replicas, and where.

    Attributes:
        num_replicas: how many.
        tp: as in RunConfig.
        device: as in RunConfig.
        address: of a Ray cluster; None: start one on this machine.
        drain_timeout: seconds for running requests when a replica is replaced.
    """

    num_replicas: int
    tp: int = 1
    device: str = "auto"
    address: str | None = None
    drain_timeout: float = 30.0

    def gpus_per_replica(self, cluster_gpus: float) -> int:
        """GPUs of each replica, all on one node, in a cluster with ``cluster_gpus``."""
        return (
            self.tp if self.device == "cuda" or (self.device == "auto" and cluster_gpus > 0) else 0
        )

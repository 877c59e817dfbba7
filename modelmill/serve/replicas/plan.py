"""What replicas serve, and where: plain data, without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelmill.serve.message import Open


@dataclass(frozen=True)
class Plan:
    """What every replica serves. names and orders belong together.

    queue: as --max-waiting; body, text: as --max-body-bytes and --max-text-body-bytes; level: as --log-level; otlp: as
    --otlp-endpoint. generation:
    another number makes Ray Serve replace the replicas.
    """

    names: tuple[str, ...]
    orders: tuple[Open, ...]
    queue: int
    body: int
    level: str
    otlp: str | None = None
    generation: int = 0
    text: int = 4 << 20

    def beside(self, count: int) -> Plan:
        """For one of ``count`` replicas that load at once on one machine: each takes its part of the memory."""

        def parted(order: Open) -> Open:
            engines = 1 + order.earlier + len(order.others)
            return replace(order, others=(*order.others, *(0,) * (engines * (count - 1))))

        return replace(self, orders=tuple(map(parted, self.orders)))


@dataclass(frozen=True)
class Shape:
    """count: replicas. tp, device: as in RunConfig. address: of a Ray cluster; None: one of our own, on this machine
    alone. patience: seconds for running answers when a replica is replaced.
    """

    count: int
    tp: int = 1
    device: str = "auto"
    address: str | None = None
    patience: float = 30.0

    def gpus(self, there: float) -> int:
        """GPUs for each replica, all on one node, in a cluster that has so many."""
        return self.tp if self.device == "cuda" or (self.device == "auto" and there > 0) else 0

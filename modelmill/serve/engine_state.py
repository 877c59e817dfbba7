"""What an engine is doing, how far its load is, and the errors of one that takes no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modelmill.core.errors import CapacityError, ModelmillError

LOAD_STAGE_FRACTIONS = {"checking": (0.05, 0.3), "loading": (0.3, 0.9), "warming up": (0.9, 1.0)}
"""Stages of loading an engine → where they begin and end, of 1."""


class EngineState(StrEnum):
    """State of an engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineNotReady(ModelmillError):
    """The engine is loading or restarting."""


class ServerShuttingDown(EngineNotReady):
    """The server is being shut down."""


class QueueFull(CapacityError):
    """The queue has no room for the request."""


@dataclass(frozen=True)
class LoadProgress:
    """Progress of loading; ``done`` and ``total`` in the unit of the stage."""

    stage: str = "starting"
    done: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        """Progress of the whole load, from 0 to 1; others come before LOAD_STAGE_FRACTIONS."""
        begin, end = LOAD_STAGE_FRACTIONS.get(self.stage, (0.0, 0.0))
        done = min(self.done / self.total, 1.0) if self.total else 0.0
        return round(begin + (end - begin) * done, 3)

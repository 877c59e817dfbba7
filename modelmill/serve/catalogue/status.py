"""The state of an engine as the API shows it, whether it is loaded on demand or always."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from modelmill.serve.catalogue.manager import ModelManager
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState

_STATE_NAMES = {
    EngineState.UNLOADED: "unloaded",
    EngineState.LOADING: "loading",
    EngineState.READY: "loaded",
    EngineState.SLEEPING: "sleeping",
    EngineState.RESTARTING: "loading",
    EngineState.FAILED: "failed",
    EngineState.STOPPED: "unloaded",
}


@dataclass(frozen=True)
class ModelStatus:
    """State of a served engine.

    Attributes:
        state: "unloaded", "loading" (also: waits for its turn to), "loaded", "sleeping",
            "unloading" or "failed".
        progress: of loading, from 0 to 1.
        on_demand: loaded for the first request, and unloaded when unused.
        pinned: not unloaded by time or memory.
        expires_at: seconds since 1970 when it is unloaded if nothing uses it; None: it is not.
        num_waiting: requests that wait until it is loaded.
        error: why it could not be loaded the last time.
    """

    state: str
    progress: float
    on_demand: bool = False
    pinned: bool = True
    expires_at: float | None = None
    num_waiting: int = 0
    error: str | None = None


def model_status(engine: EngineClient, catalogue: ModelManager | None) -> ModelStatus:
    """The state of an engine."""
    model = None if catalogue is None else catalogue.find_model_by_client(engine)
    if catalogue is None or model is None:
        state = _STATE_NAMES[engine.state]
        return ModelStatus(state, _load_fraction(state, engine))
    state = catalogue.state_for_clients(model)
    is_queued = state != model.state
    seconds = catalogue.seconds_to_expiry(model)
    expires = model.instance is not None and not math.isinf(seconds)
    return ModelStatus(
        state,
        0.0 if is_queued else _load_fraction(model.state, engine),
        on_demand=True,
        pinned=model.pinned,
        expires_at=time.time() + seconds if expires else None,
        num_waiting=catalogue.num_waiting(model),
        error=model.error,
    )


def _load_fraction(state: str, engine: EngineClient) -> float:
    if state == "loading":
        return engine.progress.fraction
    return 1.0 if state in ("loaded", "sleeping", "unloading") else 0.0

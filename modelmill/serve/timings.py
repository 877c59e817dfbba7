"""Token counts and times of a request, as llama.cpp's server reports them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from modelmill.request_output_state import RequestOutputState
from modelmill.serve.generation_schema import GenerationFields


def request_timings(states: Sequence[RequestOutputState]) -> dict[str, Any]:
    """Timings of the first prompt of a request so far; times in milliseconds.

    ``prompt_n`` are the tokens that were computed, ``cache_n`` those from the prefix cache. The
    first token comes with the prompt, so the rate of the others does not count it.
    """
    state = states[0]
    output = state.output
    now = time.perf_counter() - state.start_time
    total = output.seconds if output.seconds is not None else now
    first = output.first_token_seconds if output.first_token_seconds is not None else total
    computed = len(output.prompt_token_ids) - output.cached_tokens
    predicted = sum(len(each.token_ids) for each in output.outputs)
    return {
        "cache_n": output.cached_tokens,
        **_phase_timings("prompt", computed, computed, first),
        **_phase_timings("predicted", predicted, max(predicted - 1, 0), max(total - first, 0.0)),
    }


def timing_and_warning_fields(
    body: GenerationFields, states: Sequence[RequestOutputState]
) -> dict[str, Any]:
    """Keys of an answer that are known at its end: timings and warnings, if there are any."""
    out: dict[str, Any] = {}
    if body.timings_per_token:
        out["timings"] = request_timings(states)
    if body.warnings:
        out["warnings"] = body.warnings
    return out


def _phase_timings(name: str, count: int, timed: int, seconds: float) -> dict[str, Any]:
    """Timings of a phase with ``count`` tokens, of which ``timed`` took the time."""
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / timed if timed else 0.0,
        f"{name}_per_second": timed / seconds if timed and seconds else 0.0,
    }

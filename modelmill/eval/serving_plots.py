"""Plots of a serving benchmark: latency distributions, goodput and requests over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelmill.eval.openai_client import RequestTiming
from modelmill.eval.report import quantile
from modelmill.eval.serving_load import ServingLoad, goodput

GRID_SHAPE = (2, 3)
CURVE_POINTS = 60


def draw_subplots(
    axes: Sequence[Any], timings: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> None:
    """Draw six subplots.

    ``timings`` contains at least one request without an error; ``seconds`` is the time of the whole
    load.
    """
    good = [each for each in timings if each.error is None]
    per_token = [each.seconds_per_token for each in good if each.seconds_per_token is not None]
    draw_cdf(axes[0], "first token", [each.first_token_seconds for each in good], load.first_ms)
    draw_cdf(axes[1], "per output token", per_token, load.token_ms)
    draw_cdf(axes[2], "between pieces", [gap for each in good for gap in each.chunk_gaps], None)
    draw_cdf(axes[3], "whole request", [each.total_seconds for each in good], None)
    draw_goodput_by_ttft_limit(axes[4], good, seconds, load)
    draw_running_requests(axes[5], good)


def draw_cdf(axes: Any, name: str, seconds: Sequence[float], limit_ms: float | None) -> None:
    """Draw the cumulative distribution with median and p99, and the limit if there is one."""
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    ordered = sorted(1000 * each for each in seconds)
    if not ordered:
        return
    count = len(ordered)
    axes.step([ordered[0], *ordered], [rank / count for rank in range(count + 1)], where="post")
    for share, style in ((0.5, "--"), (0.99, ":")):
        value = quantile(ordered, share)
        axes.axvline(
            value,
            linestyle=style,
            color="grey",
            label=f"{'median' if share == 0.5 else 'p99'} {value:.4g} ms",
        )
    if limit_ms is not None:
        axes.axvline(limit_ms, color="tab:red", label=f"limit {limit_ms:g} ms")
    axes.legend(fontsize=7, loc="lower right")


def draw_goodput_by_ttft_limit(
    axes: Any, good: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> None:
    """Draw good requests per second against the limit of the time to first token.

    The limit of the time per token is that of the load.
    """
    longest = max(1000 * each.first_token_seconds for each in good)
    limits = [longest * 1.1 * (limit + 1) / CURVE_POINTS for limit in range(CURVE_POINTS)]
    axes.plot(limits, [goodput(good, seconds, limit, load.token_ms) for limit in limits])
    if load.first_ms is not None:
        axes.axvline(load.first_ms, color="tab:red", label=f"limit {load.first_ms:g} ms")
        axes.legend(fontsize=7)
    rest = "" if load.token_ms is None else f", {load.token_ms:g} ms a token"
    axes.set_title(f"good requests/s{rest}", fontsize=10)
    axes.set_xlabel("limit of the first token, ms")
    axes.set_ylim(bottom=0)


def draw_running_requests(axes: Any, good: Sequence[RequestTiming]) -> None:
    """Draw the number of running requests over time."""
    start = min(each.start for each in good)
    moments = sorted(
        [(each.start - start, 1) for each in good]
        + [(each.chunk_times[-1] - start, -1) for each in good]
    )
    at_once = 0
    times = [0.0]
    counts = [0]
    for when, change in moments:
        at_once += change
        times.append(when)
        counts.append(at_once)
    axes.step(times, counts, where="post")
    axes.set_title("requests at once", fontsize=10)
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)

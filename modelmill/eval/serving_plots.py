"""What requests saw, drawn: how first tokens, times per token, gaps and whole requests are
distributed, and goodput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelmill.eval.openai_client import RequestTiming
from modelmill.eval.report import quantile
from modelmill.eval.serving_load import ServingLoad, goodput

GRID_SHAPE = (2, 3)
CURVE_POINTS = 60


def draw_plots(
    axes: Sequence[Any], timings: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> None:
    """Six diagrams. timings: at least one without an error. seconds: of the whole load."""
    good = [each for each in timings if each.error is None]
    per_token = [each.seconds_per_token for each in good if each.seconds_per_token is not None]
    draw_distribution(
        axes[0], "first token", [each.first_token_seconds for each in good], load.first_ms
    )
    draw_distribution(axes[1], "per output token", per_token, load.token_ms)
    draw_distribution(
        axes[2], "between pieces", [gap for each in good for gap in each.chunk_gaps], None
    )
    draw_distribution(axes[3], "whole request", [each.total_seconds for each in good], None)
    draw_goodput(axes[4], good, seconds, load)
    draw_timeline(axes[5], good)


def draw_distribution(
    axes: Any, name: str, seconds: Sequence[float], limit_ms: float | None
) -> None:
    """The share of all that took no longer, with median and p99 named, and the limit where there is
    one.
    """
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    ordered = sorted(1000 * each for each in seconds)
    if not ordered:
        return
    count = len(ordered)
    axes.step([ordered[0], *ordered], [place / count for place in range(count + 1)], where="post")
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


def draw_goodput(
    axes: Any, good: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> None:
    """Good requests a second, were the limit of the first token another one; that of the others
    stays.
    """
    longest = max(1000 * each.first_token_seconds for each in good)
    places = [longest * 1.1 * (place + 1) / CURVE_POINTS for place in range(CURVE_POINTS)]
    axes.plot(places, [goodput(good, seconds, place, load.token_ms) for place in places])
    if load.first_ms is not None:
        axes.axvline(load.first_ms, color="tab:red", label=f"limit {load.first_ms:g} ms")
        axes.legend(fontsize=7)
    rest = "" if load.token_ms is None else f", {load.token_ms:g} ms a token"
    axes.set_title(f"good requests/s{rest}", fontsize=10)
    axes.set_xlabel("limit of the first token, ms")
    axes.set_ylim(bottom=0)


def draw_timeline(axes: Any, good: Sequence[RequestTiming]) -> None:
    """Requests that were being answered at each moment."""
    start = min(each.start for each in good)
    moments = sorted(
        [(each.start - start, 1) for each in good]
        + [(each.chunk_times[-1] - start, -1) for each in good]
    )
    at_once, times, counts = 0, [0.0], [0]
    for when, change in moments:
        at_once += change
        times.append(when)
        counts.append(at_once)
    axes.step(times, counts, where="post")
    axes.set_title("requests at once", fontsize=10)
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)

"""``bench serve``: load test of a server with OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.output import format_cell, print_table, show_progress
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.eval.openai_client import RequestTiming

LATENCY_ROW_TITLES = {
    "first_token_ms": "first token (TTFT), ms",
    "per_token_ms": "per output token (TPOT), ms",
    "between_pieces_ms": "between pieces (ITL), ms",
    "whole_ms": "whole request (E2E), ms",
}
RATE_UNITS = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "good_requests_per_s": "requests/s",
}


def check_load_test_options(args: Any) -> None:
    """Check the options.

    Raises:
        UsageError: if there is no address, or a number is not positive.
    """
    if args.engine is not None:
        raise UsageError(
            f"bench serve measures a server, not {args.engine}; start one with modelmill serve"
        )
    if args.url is None:
        raise UsageError("bench serve needs --url, the address of a server")
    for name in ("request_rate", "concurrency", "first_ms", "token_ms"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {value}")


def run_load_test(args: Any) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Run one load; returns its figures and a function that plots them into a file."""
    from modelmill.eval.datasets import sample_request_lengths
    from modelmill.eval.openai_client import OpenAIClient
    from modelmill.eval.serving_load import ServingLoad, run_serving_load, summarize_load

    remote = OpenAIClient.from_url(args.url, args.api_key)
    count = args.num_prompts or (500 if args.trace else 100)
    lengths = (
        [(args.input_len, args.output_len)] * count
        if args.trace is None
        else sample_request_lengths(args.trace, count)
    )
    load_options = {
        "seed": args.run.seed,
        "chat": args.endpoint == "chat",
        "ignore_eos": args.ignore_eos,
    }
    load = ServingLoad(
        lengths, args.request_rate, args.concurrency, args.first_ms, args.token_ms, **load_options
    )

    async def measure() -> tuple[str, list[RequestTiming], float]:
        model = args.model or await remote.first_text_model_id()
        with show_progress("requests", quiet=args.json) as on_progress:
            return model, *await run_serving_load(remote, model, load, on_progress)

    model, requests, seconds = asyncio.run(measure())

    def draw(path: Path) -> None:
        from modelmill.eval.report import plot
        from modelmill.eval.serving_plots import GRID_SHAPE, draw_subplots

        plot(
            path,
            lambda axes: draw_subplots(axes, requests, seconds, load),
            f"{model} at {args.url}",
            GRID_SHAPE,
        )

    return {
        "what": "serve",
        "url": args.url,
        "model": model,
        **summarize_load(requests, seconds, load),
    }, draw


def make_serve_result_rows(
    command: str, results: dict[str, Any], args: Any
) -> list[dict[str, Any]]:
    """Make a row per figure; its device is the server's address, which may be another machine."""
    from modelmill.eval.report import make_row

    about = {
        name: results[name]
        for name in ("model", "requests", "failed", "prompt_tokens", "output_tokens", "seconds")
    }
    about |= {
        name: getattr(args, name)
        for name in ("endpoint", "request_rate", "concurrency", "first_ms", "token_ms")
    }
    rows = []
    for figure in LATENCY_ROW_TITLES:
        spread = results[figure]
        if spread is not None:
            details = {**about, "spread": spread}
            rows.append(
                make_row(
                    command, f"serve.{figure}", spread["median"], "ms", results["url"], **details
                )
            )
    for figure, unit in RATE_UNITS.items():
        if results[figure] is not None:
            rows.append(
                make_row(command, f"serve.{figure}", results[figure], unit, results["url"], **about)
            )
    return rows


def show_load_test_results(results: dict[str, Any]) -> None:
    """Print a table of times and one of rates."""
    rows = [
        [name, *[results[key][each] for each in ("mean", "median", "p90", "p99")]]
        for key, name in LATENCY_ROW_TITLES.items()
        if results[key] is not None
    ]
    print_table(
        ["", "mean", "median", "p90", "p99"], rows, f"{results['model']} at {results['url']}"
    )
    counts = {
        "requests": f"{results['requests'] - results['failed']} of {results['requests']}",
        "prompt tokens": results.get("prompt_tokens"),
        "seconds": results["seconds"],
        "requests/s": results["requests_per_s"],
        "output tokens/s": results["output_tokens_per_s"],
        "good requests/s": results["good_requests_per_s"],
    }
    print_table(
        ["", ""],
        [[name, format_cell(value)] for name, value in counts.items() if value is not None],
    )
    if results["errors"]:
        print_table(["errors"], [[each] for each in results["errors"]])

"""``bench serve``: any server that speaks OpenAI's API, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.output import progress, shown, table
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.eval.remote import Visit

ROWS = {
    "first_token_ms": "first token (TTFT), ms",
    "per_token_ms": "per output token (TPOT), ms",
    "between_pieces_ms": "between pieces (ITL), ms",
    "whole_ms": "whole request (E2E), ms",
}
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "good_requests_per_s": "requests/s",
}


def check_serve(args: Any) -> None:
    """Raises UsageError for what makes no load."""
    if args.engine is not None:
        raise UsageError(f"bench serve measures a server, not {args.engine}; start one with modelmill serve")
    if args.url is None:
        raise UsageError("bench serve needs --url, the address of a server")
    for name in ("request_rate", "concurrency", "first_ms", "token_ms"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {value}")


def measure_serve(args: Any) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """The figures of one load, and what draws them into a file."""
    from modelmill.eval.remote import Remote
    from modelmill.eval.serving import Load, run, summary
    from modelmill.eval.texts import read_trace

    remote = Remote.at(args.url, args.api_key)
    count = args.num_prompts or (500 if args.trace else 100)
    lengths = [(args.input_len, args.output_len)] * count if args.trace is None else read_trace(args.trace, count)
    asked = {"seed": args.run.seed, "chat": args.endpoint == "chat", "ignore_eos": args.ignore_eos}
    load = Load(lengths, args.request_rate, args.concurrency, args.first_ms, args.token_ms, **asked)

    async def all_of_it() -> tuple[str, list[Visit], float]:
        model = args.model or await remote.first_model()
        with progress("requests", quiet=args.json) as ended:
            return model, *await run(remote, model, load, ended)

    model, found, seconds = asyncio.run(all_of_it())

    def drawn(path: Path) -> None:
        from modelmill.eval.report import plot
        from modelmill.eval.serving_plots import SHAPE, draw

        plot(path, lambda axes: draw(axes, found, seconds, load), f"{model} at {args.url}", SHAPE)

    return {"what": "serve", "url": args.url, "model": model, **summary(found, seconds, load)}, drawn


def rows_of_serve(command: str, measured: dict[str, Any], args: Any) -> list[dict[str, Any]]:
    """A row for each figure. Another machine may be what is measured: in the device's place stands its address."""
    from modelmill.eval.report import row

    about = {
        name: measured[name] for name in ("model", "requests", "failed", "prompt_tokens", "output_tokens", "seconds")
    }
    about |= {name: getattr(args, name) for name in ("endpoint", "request_rate", "concurrency", "first_ms", "token_ms")}
    rows = []
    for figure in ROWS:
        spread = measured[figure]
        if spread is not None:
            details = {**about, "spread": spread}
            rows.append(row(command, f"serve.{figure}", spread["median"], "ms", measured["url"], **details))
    for figure, unit in RATES.items():
        if measured[figure] is not None:
            rows.append(row(command, f"serve.{figure}", measured[figure], unit, measured["url"], **about))
    return rows


def show_serve(measured: dict[str, Any]) -> None:
    """A table of times, and one of rates."""
    rows = [[name, *[measured[key][each] for each in ("mean", "median", "p90", "p99")]] for key, name in ROWS.items()
            if measured[key] is not None]  # fmt: skip
    table(["", "mean", "median", "p90", "p99"], rows, f"{measured['model']} at {measured['url']}")
    counts = {
        "requests": f"{measured['requests'] - measured['failed']} of {measured['requests']}",
        "prompt tokens": measured.get("prompt_tokens"),
        "seconds": measured["seconds"],
        "requests/s": measured["requests_per_s"],
        "output tokens/s": measured["output_tokens_per_s"],
        "good requests/s": measured["good_requests_per_s"],
    }
    table(["", ""], [[name, shown(value)] for name, value in counts.items() if value is not None])
    if measured["errors"]:
        table(["errors"], [[each] for each in measured["errors"]])

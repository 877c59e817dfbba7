"""``bench serve``: any server that speaks OpenAI's API, under load."""

from __future__ import annotations

import asyncio
from typing import Any

from modelmill.cli.output import progress, shown, table
from modelmill.core.errors import ModelmillError, UsageError

ROWS = {
    "first_token_ms": "first token (TTFT), ms",
    "per_token_ms": "per output token (TPOT), ms",
    "between_pieces_ms": "between pieces (ITL), ms",
    "whole_ms": "whole request (E2E), ms",
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


def measure_serve(args: Any) -> dict[str, Any]:
    """The figures of one load."""
    from modelmill.eval.remote import Remote
    from modelmill.eval.serving import Load, run, summary
    from modelmill.eval.texts import read_trace

    remote = Remote.at(args.url, args.api_key)
    count = args.num_prompts or (500 if args.trace else 100)
    lengths = [(args.input_len, args.output_len)] * count if args.trace is None else read_trace(args.trace, count)
    asked = {"seed": args.run.seed, "chat": args.endpoint == "chat", "ignore_eos": args.ignore_eos}
    load = Load(lengths, args.request_rate, args.concurrency, args.first_ms, args.token_ms, **asked)

    async def all_of_it() -> dict[str, Any]:
        model = args.model or await _model(remote)
        with progress("requests", quiet=args.json) as ended:
            found, seconds = await run(remote, model, load, ended)
        told = {"what": "serve", "url": args.url, "model": model, **summary(found, seconds, load)}
        if args.plot is not None:
            from modelmill.eval.report import plot
            from modelmill.eval.serving_plots import SHAPE, draw

            plot(args.plot, lambda axes: draw(axes, found, seconds, load), f"{model} at {args.url}", SHAPE)
        return told

    return asyncio.run(all_of_it())


async def _model(remote: Any) -> str:
    """The first model that the server lists."""
    try:
        return str((await remote.get("/v1/models"))["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ModelmillError("the server lists no model; name one with --model") from None


def show_serve(measured: dict[str, Any]) -> None:
    """A table of times, and one of rates."""
    rows = [[name, *[measured[key][each] for each in ("mean", "median", "p90", "p99")]] for key, name in ROWS.items()
            if measured[key] is not None]  # fmt: skip
    table(["", "mean", "median", "p90", "p99"], rows, f"{measured['model']} at {measured['url']}")
    counts = {
        "requests": f"{measured['requests'] - measured['failed']} of {measured['requests']}",
        "seconds": measured["seconds"],
        "requests/s": measured["requests_per_s"],
        "output tokens/s": measured["output_tokens_per_s"],
        "good requests/s": measured["good_requests_per_s"],
    }
    table(["", ""], [[name, shown(value)] for name, value in counts.items() if value is not None])
    if measured["errors"]:
        table(["errors"], [[each] for each in measured["errors"]])

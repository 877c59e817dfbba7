"""``python -m tools.soak WHAT ENGINE…``: fuzz, leaving, ends, mixed, swaps, or all of them.

Several engines are served together; if one of them segments, fuzz and mixed send segmentation
requests as well.

Flags after ``--`` go to ``modelmill serve``. Prints the results as JSON, without the time series
(--json FILE keeps them). Exit code 0: all checks passed. --max-model-len limits outputs of requests
that set no limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from modelmill.core.progress_callback import Progress
from tools.soak import client_disconnects, fuzz, mixed_load, model_swaps, shutdown
from tools.soak.server import SoakFailure, SoakServer

SOAK_TESTS = ("fuzz", "leaving", "ends", "mixed", "swaps")


def make_progress(name: str) -> Progress:
    """Make a callback that updates a line on stderr."""

    def on_progress(stage: str, done: int, total: int) -> None:
        print(
            f"\r{name}: {done} of {total} {stage}",
            end="\n" if done >= total else "",
            file=sys.stderr,
            flush=True,
        )

    return on_progress


def run_test(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one of WHAT."""
    on_progress = make_progress(name)
    if name == "ends":
        return shutdown.run_shutdown_checks(args.engines[0], args.serve, on_progress)
    if name == "swaps":
        try:
            return model_swaps.swap_models(args.engines, args.serve, args.seconds, on_progress)
        except SoakFailure as error:
            return {"what": name, "ok": False, "error": str(error)}
    with SoakServer(args.engines, args.serve) as server:
        try:
            if name == "fuzz":
                return fuzz.fuzz(server, args.count or 10_000, args.seed, on_progress)
            if name == "leaving":
                return client_disconnects.run_disconnects(server, args.count or 1000, on_progress)
            return mixed_load.run_mixed_load(server, args.minutes, args.seed, on_progress)
        except SoakFailure as error:
            return {"what": name, "ok": False, "error": str(error)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tools.soak", description=__doc__)
    parser.add_argument("what", choices=(*SOAK_TESTS, "all"))
    parser.add_argument(
        "engines", type=Path, nargs="+", metavar="engine", help="ends serves the first alone"
    )
    parser.add_argument(
        "--count", type=int, help="requests of fuzz (10000), clients of leaving (1000)"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of mixed")
    parser.add_argument("--seconds", type=float, default=600.0, help="of swaps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results with the memory over time")
    parser.add_argument("--plot", type=Path, help="write a plot of mixed")
    separator = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:separator])
    args.serve = argv[separator + 1 :]
    return args


def main(argv: list[str]) -> int:
    """Run the tests, print and save the results."""
    args = parse_args(argv)
    results = [
        run_test(name, args) for name in (SOAK_TESTS if args.what == "all" else (args.what,))
    ]
    for result in results:
        if args.plot and "seconds_median" in result:
            mixed_load.plot(result, args.plot)
        print(
            json.dumps(
                {name: value for name, value in result.items() if name != "series"}, indent=1
            )
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

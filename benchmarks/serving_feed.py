"""Measure the API process's cost per token: real clients and API, a worker without computation.

    python -m benchmarks.serving_feed ENGINE [--streams 64] [--tokens 160] [--step-ms 1.8]
    [--against TREE]

The worker's process is the real one around a loop that returns random ids at once (--step-ms 0: as
fast as they go), so that a CPU shows what a GPU's 35,000 tokens a second ask of everything behind
it. ENGINE gives the tokenizer; its weights are not read. --against: the root of another checkout,
served in turn with this one, in the other order every round; ratios are of one run. CPU seconds of
the processes show the same, independent of other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent.parent
MIN_ROUNDS = 5
ROUND_SECONDS = 0.2
"""Seconds of silence before each side."""


class FakeEngineCore:
    """An engine core for ``serve.worker.EngineWorker``: a step gives every request one token."""

    def __init__(self, vocab: int, step: float, seed: int = 0) -> None:
        """step: seconds from one step to the next; one that is late is not made up for."""
        self._rng, self._vocab, self._step, self._due = random.Random(seed), vocab, step, 0.0
        self._left: dict[str, int] = {}
        self.input_processor = self.output_processor = self
        self.live_sequences: dict[str, list[Any]] = {}
        self.steps = self.num_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is open."""
        return bool(self._left)

    def add(self, request: Any, make_guide: Any = None) -> None:  # noqa: ARG002  as the core's
        """Open a request."""
        self._left[request.id] = request.params.max_tokens
        leader = SimpleNamespace(request=request, started_at=None, finish_reason=None)
        self.live_sequences[request.id] = [leader]

    def abort(self, id: str) -> None:
        """Close it."""
        self._left.pop(id, None)
        self.live_sequences.pop(id, None)

    def finish(self, id: str, index: int) -> None:  # noqa: ARG002  as the loop's
        """Close it."""
        self.abort(id)

    def step(self) -> list[Any]:
        """A token of each."""
        from modelmill.core.types import FinishReason, TokenOutput

        now = time.perf_counter()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(now, self._due) + self._step
        outputs = []
        for id in list(self._left):
            self._left[id] -= 1
            leader = self.live_sequences[id][0]
            leader.started_at = leader.started_at or now
            last = not self._left[id]
            outputs.append(
                TokenOutput(
                    id,
                    0,
                    self._rng.randrange(MIN_ROUNDS, self._vocab),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            if last:
                self.abort(id)
        self.steps, self.num_tokens = self.steps + 1, self.num_tokens + len(outputs)
        return outputs

    def stats(self) -> Any:
        """Where it stands."""
        from modelmill.core.types import EngineStats

        return EngineStats(len(self._left), 0, 1, 1, 0, self.steps, 0, self.num_tokens, 0, 0)


def run_worker(fd: int, engine: str, step: float) -> None:
    """The worker's process."""
    import os
    import socket

    from modelmill.artifact.store import open_artifact
    from modelmill.serve.worker import EngineWorker
    from modelmill.serve.worker_inbox import MessageChannel, WorkerInbox
    from modelmill.serve.worker_messages import EngineReady

    wire = MessageChannel(socket.socket(fileno=fd))
    wire.receive()
    manifest = open_artifact(Path(engine)).manifest
    vocab = int(manifest.config["vocab_size"])
    wire.send(EngineReady(engine, "cpu", vocab, manifest.max_model_len, 1 << 20, 16, 1, 512))
    core: Any = FakeEngineCore(vocab, step)
    EngineWorker(core, wire, WorkerInbox(wire, on_server_gone=lambda: os._exit(0))).run()


def run_api(engine: str, root: str, step: float) -> None:
    """The API's process."""
    from modelmill.serve import worker_process
    from modelmill.serve.engine_client import EngineClient
    from modelmill.serve.server import Server, ServerOptions
    from modelmill.serve.worker_messages import OpenEngine

    async def launch() -> Any:
        import socket

        api_socket, child_socket = socket.socketpair()
        with child_socket:
            words = [
                sys.executable,
                __file__,
                engine,
                "--root",
                root,
                "--feed",
                str(child_socket.fileno()),
            ]
            process = await asyncio.create_subprocess_exec(
                *words, "--step-ms", str(1000 * step), pass_fds=(child_socket.fileno(),)
            )
        return api_socket, worker_process.WorkerSubprocess(process)

    async def serve() -> None:
        served = EngineClient("load", OpenEngine(engine, {}, {}), max_waiting=4096, launch=launch)
        await Server([served], ServerOptions(port=0)).run(lambda url: note(f"listening on {url};"))

    asyncio.run(serve())


class CheckoutServer:
    """An API that is served from one checkout."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        words = [sys.executable, __file__, str(args.engine), "--api", "--root", str(root)]
        words += ["--step-ms", str(args.step_ms)]
        if args.profile:
            words[1:1] = ["-m", "cProfile", "-o", str(args.profile)]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        match = re.search(r"listening on (http://[^;]+);", line := self._process.stderr.readline())
        if match is None:
            raise RuntimeError(line + self._process.stderr.read())
        from modelmill.eval.openai_client import OpenAIClient

        self.client = OpenAIClient.from_url(match[1])

    def ready(self, cores: list[int]) -> None:
        """Wait for it; pin the worker and the API where cores were named."""
        import psutil

        from modelmill.core.errors import ModelmillError

        for _ in range(600):
            try:
                asyncio.run(self.client.get("/health"))
                break
            except ModelmillError:
                time.sleep(0.1)
        self._api = psutil.Process(self._process.pid)
        (self._worker,) = self._api.children()
        for process, core in zip((self._worker, self._api), cores):
            process.cpu_affinity([core])

    def run_round(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """One round: its figures."""
        import psutil

        from benchmarks.serving_load import time_streams

        time.sleep(ROUND_SECONDS)
        which = {"worker": self._worker, "api": self._api, "client": psutil.Process()}
        before = {name: each.cpu_times() for name, each in which.items()}
        figures = asyncio.run(time_streams(self.client, prompts, tokens))
        for name, each in which.items():
            now = each.cpu_times()
            figures[name + "_us"] = 1e6 * (
                now.user + now.system - before[name].user - before[name].system
            )
            figures[name + "_us"] /= tokens * len(prompts)
        return figures

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate(timeout=30)


def compare_checkouts(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turn, and their figures."""
    from benchmarks.serving_load import LoadPlan, median_min_max

    roots = {"here": HERE, **({"against": args.against.resolve()} if args.against else {})}
    sides = {name: CheckoutServer(args, root) for name, root in roots.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for side in sides.values():
            side.ready(args.cores)
        plan = LoadPlan(args.streams, args.prompt, args.tokens, 0, 0, args.seed, args.vocab)
        for round in range(-1, args.rounds):
            for name in sorted(sides, reverse=bool(round % 2)):
                figures = sides[name].run_round(
                    plan.prompts(round, args.streams, args.prompt), args.tokens
                )
                if round >= 0:
                    rounds[name].append(figures)
                    note(
                        f"{name} "
                        + ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                    )
    finally:
        for side in sides.values():
            side.close()
    count = args.streams * args.tokens
    out: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens, "step_ms": args.step_ms}
    out["rounds"] = args.rounds
    for name, of_side in rounds.items():
        out[name] = {key: median_min_max([each[key] for each in of_side]) for key in of_side[0]}
        out[name]["tokens_per_s"] = median_min_max([count / each["served_s"] for each in of_side])
    if args.against:
        for key in ("served_s", "api_us"):
            ratios = [a[key] / b[key] for a, b in zip(rounds["here"], rounds["against"])]
            out[f"{key}_here_over_against"] = {
                **median_min_max(ratios),
                "mean": statistics.mean(ratios),
            }
    return out


def note(line: str) -> None:
    """To the terminal."""
    print(line, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--vocab", type=int, default=500, help="ids of prompts are below")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument(
        "--cores", type=int, nargs="*", default=[], help="of the worker and of the API"
    )
    parser.add_argument("--profile", type=Path, help="cProfile's file, of the API")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, default=HERE, help=argparse.SUPPRESS)
    parser.add_argument("--api", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--feed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    args = parse_args()
    sys.path.insert(0, str(args.root))
    if args.feed is not None:
        run_worker(args.feed, str(args.engine), args.step_ms / 1000)
    elif args.api:
        run_api(str(args.engine), str(args.root), args.step_ms / 1000)
    else:
        result = compare_checkouts(args)
        print(json.dumps(result, indent=1))
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

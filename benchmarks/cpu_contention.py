"""Time CPU prompts, alone and beside a process that keeps one core busy, per OpenMP setting.

    python benchmarks/cpu_contention.py ENGINE [--uses cli server library] [--rounds 5] [--pin CPU]
    [--out FILE.jsonl]

Each setting has a process of its own; they take turns prompt by prompt, so that all meet the same
machine. "ours" sets nothing; the others are what a user could set. cli: the process as the command
line prepares it. server: ``modelmill serve``. library: a program that imports torch first.
--realtime (as root): the quiet half at real-time priority, on a machine that others use meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.append_rows import append_rows, portable_command  # noqa: E402
from benchmarks.serve_command import serve_command  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402

OPENMP_SETTINGS: dict[str, dict[str, str]] = {
    "ours": {},
    "runtime's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "one thread": {},
}
LENGTHS = (16, 128, 512)
CHILD = """
import random, sys, time
engine, use, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]) or None
if use == "cli":
    from modelmill.core import env, malloc
    env.set_openmp_passive_waiting(), malloc.set_malloc_thresholds()
import torch
from modelmill import LLM, SamplingParams
llm = LLM(engine, device="cpu", threads=threads)
draw = random.Random(1)
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    ids = [draw.randrange(100, llm.engine_core.vocab - 100) for _ in range(int(line))]
    began = time.perf_counter()
    llm.generate({"prompt_token_ids": ids, "cache_salt": str(number)}, SamplingParams(max_tokens=1), progress=False)
    print(time.perf_counter() - began, flush=True)
"""  # noqa: E501


class PipeProcess:
    """A process that takes lengths on its standard input and gives seconds."""

    def __init__(self, engine: Path, use: str, setting: str) -> None:
        command = [sys.executable, "-c", CHILD, str(engine), use, str(int(setting == "one thread"))]
        self.process = subprocess.Popen(
            command,
            env=make_environment(setting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until the engine is open."""
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("the process has ended")

    def seconds(self, length: int) -> float:
        """Of one prompt."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(length, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


class HttpServer:
    """A server, called over HTTP."""

    def __init__(self, engine: Path, use: str, setting: str) -> None:
        del use
        self.port, self.draw, self.number = random.randrange(20000, 60000), random.Random(1), 0
        command = serve_command([engine], self.port, "--device", "cpu")
        more = ["--threads", "1"] if setting == "one thread" else []
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*command, *more], env=make_environment(setting), **silent)  # type: ignore[call-overload]

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            try:
                base = f"http://127.0.0.1:{self.port}"
                # 503 until the engine is open
                urllib.request.urlopen(f"{base}/health", timeout=5).close()
                with urllib.request.urlopen(f"{base}/v1/models", timeout=5) as reply:
                    self.model = json.load(reply)["data"][0]["id"]
                    return
            except (urllib.error.URLError, ConnectionError, IndexError):
                time.sleep(0.2)
        raise SystemExit("the server has ended")

    def seconds(self, length: int) -> float:
        """Of one prompt."""
        self.number += 1
        ids = [self.draw.randrange(100, 40000) for _ in range(length)]
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "cache_salt": f"{self.number}"}
        url, headers = (
            f"http://127.0.0.1:{self.port}/v1/completions",
            {"Content-Type": "application/json"},
        )
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as reply:
            reply.read()
        return time.perf_counter() - began


def make_environment(setting: str) -> dict[str, str]:
    """The environment of a setting's process."""
    clean = {
        n: v
        for n, v in os.environ.items()
        if n not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    }
    return {**clean, **OPENMP_SETTINGS[setting]}


def descendants(pid: int) -> Iterator[int]:
    """Threads of a process and of its children."""
    import psutil

    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        yield from (thread.id for thread in each.threads())


def measure(
    sides: dict[str, Any], options: argparse.Namespace
) -> Iterator[tuple[str, int, str, list[float]]]:
    """(machine, length, setting, seconds)."""
    for machine in ("quiet", "one core taken"):
        busy = None
        for side in sides.values() if options.realtime else ():
            for thread in descendants(side.process.pid):
                rank = (os.SCHED_FIFO, 1) if machine == "quiet" else (os.SCHED_OTHER, 0)
                os.sched_setscheduler(thread, rank[0], os.sched_param(rank[1]))
        if machine != "quiet":
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            if options.pin is not None:
                os.sched_setaffinity(busy.pid, {options.pin})
        try:
            measured: dict[tuple[int, str], list[float]] = {}
            for number in range(options.rounds):
                for length in LENGTHS:
                    for _ in range(1 if length == max(LENGTHS) else 2):
                        for name, side in sides.items():
                            measured.setdefault((length, name), []).append(side.seconds(length))
                print(f"  {machine}: round {number + 1} of {options.rounds}", file=sys.stderr)
            for (length, name), seconds in measured.items():
                yield machine, length, name, seconds
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()


def main() -> None:
    """Measure, print a table, append rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument(
        "--uses",
        nargs="+",
        default=["cli", "server", "library"],
        choices=("cli", "server", "library"),
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pin", type=int, help="processor that the busy process is bound to")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.jsonl")
    options = parser.parse_args()
    import torch

    from modelmill.eval.report import cpu_name

    facts = {
        "device": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "engine": options.engine.name,
        **provenance(),
    }
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for use in options.uses:
        sides: dict[str, Any] = {}
        try:
            for name in OPENMP_SETTINGS:
                sides[name] = (HttpServer if use == "server" else PipeProcess)(
                    options.engine, use, name
                )
            for side in sides.values():
                side.wait()
                for length in LENGTHS:
                    side.seconds(length)
            rows = [row(use, options.pin, *each) for each in measure(sides, options)]
        finally:
            for side in sides.values():
                side.process.terminate()
                side.process.wait()
        print_table(rows)
        append_rows(
            options.out,
            [{**r, "facts": {**facts, "versions": versions}} for r in rows],
            portable_command("cpu_contention", sys.argv[1:]),
        )


def row(
    use: str, pin: int | None, machine: str, length: int, setting: str, seconds: list[float]
) -> dict[str, Any]:
    """One line of the results."""
    ordered = sorted(seconds)
    high = ordered[int(0.9 * (len(ordered) - 1))]
    return {
        "figure": "busy_neighbour.prompt_s", "use": use, "machine": machine,
        "pinned": pin is not None,
        "prompt": length, "setting": setting, "value": statistics.median(ordered), "unit": "s",
        "spread": {"p90": high, "min": ordered[0], "max": ordered[-1], "runs": len(ordered)},
    }  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print p50/p90 in ms per machine state and length, and ours over the best other."""
    print(
        f"{rows[0]['use']:<10}{'':>20}"
        + "".join(f"{name:>18}" for name in OPENMP_SETTINGS)
        + f"{'ours / best':>14}"
    )
    for machine, length in dict.fromkeys((r["machine"], r["prompt"]) for r in rows):
        line = {r["setting"]: r for r in rows if (r["machine"], r["prompt"]) == (machine, length)}
        cells = "".join(
            f"{1e3 * line[n]['value']:>10.0f} /{1e3 * line[n]['spread']['p90']:>6.0f}"
            for n in OPENMP_SETTINGS
        )
        best = min(each["value"] for each in line.values())
        print(f"{machine:<18}{length:>6} tokens" + cells + f"{line['ours']['value'] / best:>14.2f}")


if __name__ == "__main__":
    main()

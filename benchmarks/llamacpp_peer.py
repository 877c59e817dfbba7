"""Compare modelmill and llama.cpp on one CPU in turn: prefill and decode of a small model.

    python benchmarks/llamacpp_peer.py ENGINE GGUF --peer-python /venv/bin/python [--threads 2]
    [--rounds 7] [--busy 0]

ENGINE is a modelmill engine, GGUF the file that llama.cpp runs, and peer-python an interpreter that
has a llama.cpp wheel (``pip install xllamacpp`` in a virtual environment of its own). Each round
runs every prompt once on either
side, the first side changing from round to round. Both sides report the same figures: prefill is
the
prompt's tokens
over the time to the first token, decode the tokens after the first over the time from the first to
the last. Medians
of the rounds and their spread are printed, and appended to --out. --busy N keeps N processes
counting meanwhile, to see what a shared machine does to either side.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "cpu.jsonl"
PROMPTS = (16, 512)
Timing = tuple[float, float]  # seconds of prefill, seconds of the tokens after the first


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary tokens, other ones each time, so that no side can reuse a prompt."""
    return [1000 + (seed * 7919 + i * i * 31 + i * 17) % 40000 for i in range(count)]


# -- the peer, in a process of its own: a line of JSON in, a line out
# ------------------------------------------------


def serve_peer(gguf: str, threads: int) -> None:
    """Answer {"ids": […], "count": n} on stdin with [prefill s, decode s] on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own talk goes elsewhere
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = server.handle_completions(
            {
                "prompt": request["ids"],
                "n_predict": request["count"],
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        assert timings["prompt_n"] == len(request["ids"]), (
            "a part of the prompt was taken from a cache"
        )
        assert timings["predicted_n"] == request["count"]
        print(
            json.dumps([timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3]),
            file=out,
            flush=True,
        )


class LlamaCppPeer:
    """llama.cpp behind a pipe."""

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        command = [python, str(Path(__file__).resolve()), "--serve-peer", str(gguf), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()

    def measure(self, prompt: list[int], count: int) -> Timing:
        """One prompt and ``count`` tokens."""
        assert self._process.stdin is not None
        print(json.dumps({"ids": prompt, "count": count}), file=self._process.stdin, flush=True)
        prefill, decode = self._read()
        return prefill, decode

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the peer ended: does its python have xllamacpp, and is the GGUF readable?")
        return json.loads(line)

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()


# -- ours
# ---------------------------------------------------------------------------


def open_modelmill(
    engine: Path, threads: int
) -> tuple[Callable[[list[int], int], Timing], dict[str, Any]]:
    """A function that measures as ``LlamaCppPeer.measure`` does, and what the engine is."""
    from modelmill.core.config import RunConfig
    from modelmill.core.types import Request, SamplingParams
    from modelmill.runtime.engine_core import EngineCore

    config = RunConfig(
        device="cpu",
        threads=threads,
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_seqs=1,
    )
    loop = EngineCore.open(engine, config)
    assert loop.artifact is not None

    def measure(prompt: list[int], count: int) -> Timing:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        loop.add(Request(id="only", prompt=prompt, params=params))
        arrived = []
        while loop.has_work:
            num_tokens = len(loop.step())
            arrived += [time.perf_counter()] * num_tokens
        assert len(arrived) == count
        return arrived[0] - started, arrived[-1] - arrived[0]

    build = loop.artifact.manifest.build
    return measure, {name: build[name] for name in ("dtype", "quantization", "quantize_head")}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """``count`` processes that do nothing but count."""
    running = [
        multiprocessing.get_context("spawn").Process(target=_count, daemon=True)
        for _ in range(count)
    ]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.terminate()
            process.join()


def _count() -> None:
    number = 0
    while True:
        number += 1


def device() -> str:
    """The processor's name and family."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if sys.platform == "linux"
        else []
    )
    cpuinfo = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    cpu_model = f"family {cpuinfo.get('cpu family', '?')} model {cpuinfo.get('model', '?')}"
    return (
        f"{cpuinfo.get('model name', platform.processor())} ({cpu_model}), {os.cpu_count()} cores"
    )


def main() -> None:
    """Measure both in turn, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows are appended")
    parser.add_argument(
        "--note", default="", help="what else is to be said of this run, such as its priority"
    )
    options = parser.parse_args()
    measure, engine = open_modelmill(options.engine, options.threads)
    peer = LlamaCppPeer(options.peer_python, options.gguf, options.threads)
    sides = {"ours": measure, "llama.cpp": peer.measure}
    speeds: dict[tuple[int, str, str], list[float]] = {}
    for side in sides.values():
        side(random_ids(16, 99), 8)
    with busy_processes(options.busy):
        for turn in range(options.rounds):
            for length in PROMPTS:
                for name in list(sides)[:: 1 if turn % 2 else -1]:
                    prefill, decode = sides[name](random_ids(length, turn), options.tokens)
                    speeds.setdefault((length, "prefill", name), []).append(length / prefill)
                    speeds.setdefault((length, "decode", name), []).append(
                        (options.tokens - 1) / decode
                    )
    peer.close()
    record(options, engine, speeds)


def record(
    options: argparse.Namespace,
    engine: dict[str, Any],
    speeds: dict[tuple[int, str, str], list[float]],
) -> None:
    """Print the table, and append a row per line of it."""
    import torch

    python = [
        options.peer_python,
        "-c",
        "from importlib.metadata import version; print(version('xllamacpp'))",
    ]
    wheel = subprocess.run(python, capture_output=True, text=True, check=False).stdout.strip()
    names = [a if not Path(a).is_absolute() else Path(a).name for a in sys.argv[1:]]
    common = {
        "command": shlex.join(["python", "benchmarks/llamacpp_peer.py", *names]),
        "device": device(),
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "xllamacpp": wheel,
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": engine,
        "peer": options.gguf.name,
        "threads": options.threads,
        "busy": options.busy,
        "load_average": round(os.getloadavg()[0], 1),
        "unit": "tokens/s",
    } | ({"note": options.note} if options.note else {})
    print(
        f"{common['device']}; {options.threads} threads, {options.busy} busy processes, load "
        f"{common['load_average']}"
    )
    print(
        f"{'':24}{'ours':>8}{'least':>8}{'most':>8}{'llama.cpp':>12}{'least':>8}{'most':>8}{'ratio':>8}"
    )
    with options.out.open("a", encoding="utf-8") as file:
        for length in PROMPTS:
            for phase in ("prefill", "decode"):
                engine_speeds, peer = (
                    sorted(speeds[length, phase, side]) for side in ("ours", "llama.cpp")
                )
                our_median, other = statistics.median(engine_speeds), statistics.median(peer)
                shown = f"{our_median:>8.0f}{engine_speeds[0]:>8.0f}{engine_speeds[-1]:>8.0f}{other:>12.0f}{peer[0]:>8.0f}{peer[-1]:>8.0f}"  # noqa: E501
                print(f"{phase + ', prompt ' + str(length):24}{shown}{our_median / other:>8.2f}")
                row = {
                    "op": "llamacpp_peer",
                    "phase": phase,
                    "prompt": length,
                    "ours": round(our_median, 1),
                }
                row |= {
                    "ours_spread": [round(engine_speeds[0], 1), round(engine_speeds[-1], 1)],
                    "llamacpp": round(other, 1),
                }
                row |= {
                    "llamacpp_spread": [round(peer[0], 1), round(peer[-1], 1)],
                    "ratio": round(our_median / other, 3),
                }
                file.write(json.dumps(common | row) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--serve-peer":
        serve_peer(sys.argv[2], int(sys.argv[3]))
    else:
        main()

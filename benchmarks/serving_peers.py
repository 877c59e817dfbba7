"""``modelmill serve`` and ``vllm serve`` under the same load: both on one GPU, in turn.

    python benchmarks/serving_peers.py --tokenizer FOLDER (--vllm DIR | --vllm-python PYTHON)
        [--shape qwen2.5-7b] [--trace azure] [--rate 2,4,8,16] [--concurrency 1,8,64]
        [--seconds 20] [--out FILE.jsonl]

Both serve one checkpoint with random weights and the tokenizer of FOLDER, each with 0.45 of the
GPU's memory, else as its authors chose. One client sends the same prompts to both: with Poisson
arrivals at a mean rate, or so many at a time (closed loop). Lengths are those of the trace. A row a
side and load: first token and gaps between pieces (median, p90, p99), output tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trace_file  # noqa: E402
from benchmarks.append_rows import portable_command  # noqa: E402
from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.peer_setup import SHARED_GPU_FRACTION, PeerSetup  # noqa: E402
from benchmarks.serve_command import serve_command  # noqa: E402
from modelmill.core.errors import ModelmillError  # noqa: E402
from modelmill.eval.datasets import sample_request_lengths  # noqa: E402
from modelmill.eval.openai_client import OpenAIClient  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.eval.report import device_name, versions  # noqa: E402
from modelmill.eval.serving_load import ServingLoad, run_serving_load, summarize_load  # noqa: E402

MODEL = "load"
START_SECONDS, MAX_MODEL_LEN = 300, 8192
MIN_REQUESTS, ROUNDS_OF_A_LOOP = 20, 4
SERVER_PACKAGES = ("uvicorn", "starlette", "fastapi", "pydantic", "jinja2", "prometheus_client")
LOG_LINES = 12  # of a server that ended, in the error
SIDES = ("modelmill", "vLLM")


@dataclass(frozen=True)
class NamedLoad:
    """A load under its name in rows: rate-4, or closed-8."""

    name: str
    load: ServingLoad


class PeerServer:
    """A server of one side, in a process of its own."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, log: Path, env: dict[str, str]
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self._log = name, log
        self._sink = log.open("ab")
        self._process = subprocess.Popen(
            list(command), cwd=ROOT, env=env, stdout=self._sink, stderr=subprocess.STDOUT
        )
        self.client = OpenAIClient.from_url(f"http://127.0.0.1:{port}")

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until it serves its model.

        Raises:
            ModelmillError: It ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(ModelmillError):
                if asyncio.run(self.client.get("/v1/models"))["data"] and self._answers():
                    return
            time.sleep(0.5)
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise ModelmillError(
            f"{self.name} does not serve: see {self._log}; it ends with\n"
            + "\n".join(lines[-LOG_LINES:])
        )

    def _answers(self) -> bool:
        load = ServingLoad([(8, 4)])
        timings, _ = asyncio.run(run_serving_load(self.client, MODEL, load, lambda *_: None))
        return timings[0].error is None

    def versions(self) -> dict[str, str]:
        """The peer's own version, which it tells; ours is known."""
        if self.name == "modelmill":
            return {}
        return {self.name.lower(): str(asyncio.run(self.client.get("/version"))["version"])}

    def measure(self, load: ServingLoad) -> dict[str, Any]:
        """The summary of a load."""
        timings, seconds = asyncio.run(run_serving_load(self.client, MODEL, load, lambda *_: None))
        return summarize_load(timings, seconds, load)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._sink.close()


def loads(options: argparse.Namespace) -> Iterator[NamedLoad]:
    """Every load, with prompts that no other has: nothing is found in a prefix cache."""
    trace = sample_request_lengths(options.trace, 1 << 20, MAX_MODEL_LEN // 2)
    for seed, rate in enumerate(options.rate):
        count = max(MIN_REQUESTS, round(rate * options.seconds))
        load = ServingLoad(trace[:count], rate=rate, seed=100 + seed)
        yield NamedLoad(f"rate-{rate:g}", load)
    for seed, concurrency in enumerate(options.concurrency):
        lengths = trace[: max(MIN_REQUESTS // 2, ROUNDS_OF_A_LOOP * concurrency)]
        load = ServingLoad(lengths, concurrency=concurrency, seed=200 + seed)
        yield NamedLoad(f"closed-{concurrency}", load)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_servers(options: argparse.Namespace, setup: PeerSetup) -> Iterator[PeerServer]:
    """Start vLLM on the checkpoint, build ours meanwhile, and start it."""
    checkpoint = setup.checkpoint(options.shape)
    for file in options.tokenizer.iterdir():
        shutil.copy(file, checkpoint / file.name)
    python, env = setup.vllm_environment(in_process=False)
    share = str(SHARED_GPU_FRACTION)
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--served-model-name", MODEL, "--port", str(port), "--gpu-memory-utilization", share,
        "--max-model-len", str(MAX_MODEL_LEN),
    ]  # fmt: skip
    yield PeerServer("vLLM", command, port, setup.work / "logs" / "vllm-serve.log", env)
    engine, port = setup.engine(options.shape), free_port()
    flags = (
        "--served-model-name", MODEL, "--gpu-memory-utilization", share,
        "--max-model-len", str(MAX_MODEL_LEN),
    )  # fmt: skip
    command = serve_command([engine], port, *flags)
    log = setup.work / "logs" / "modelmill-serve.log"
    yield PeerServer("modelmill", command, port, log, dict(os.environ))


def rows(
    options: argparse.Namespace, servers: Sequence[PeerServer], facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure every load, the sides in another order each time."""
    run = datetime.now(UTC).strftime("serving-%Y%m%dT%H%M%S")
    for number, each in enumerate(loads(options)):
        for server in servers[:: 1 if number % 2 == 0 else -1]:
            summary = server.measure(each.load)
            versions = {**facts["versions"], **server.versions()}
            yield {
                "bench": "serving_peers", "shape": options.shape, "work": each.name,
                "subject": server.name, **summary, "run": run,
                "command": portable_command("serving_peers", sys.argv[1:]), **facts,
                "versions": versions,
                "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """A row in short."""
    first, gap = row["first_token_ms"], row["between_pieces_ms"] or {}
    return (
        f"{row['work']:10} {row['subject']:10} first {first['median']:7.1f} {first['p90']:7.1f} "
        f"{first['p99']:7.1f} ms; gap {gap.get('median', 0):6.2f} {gap.get('p90', 0):6.2f} "
        f"{gap.get('p99', 0):7.2f} ms; {row['output_tokens_per_s']:7.0f} tokens/s; "
        f"failed {row['failed']}"
    )


def numbers(text: str) -> list[float]:
    """2,4,8 → its numbers."""
    return [float(each) for each in filter(None, text.split(","))]


def _tokenizer_folder(text: str) -> Path:
    """A folder with a tokenizer, seen before a checkpoint is written for minutes."""
    folder = Path(text)
    if not (folder / "tokenizer.json").is_file():
        raise argparse.ArgumentTypeError(f"no tokenizer.json in {text!r}")
    return folder


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(SHAPES))
    parser.add_argument(
        "--tokenizer", type=_tokenizer_folder, required=True, help="folder of tokenizer.json"
    )
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's packages")
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM")
    parser.add_argument("--trace", type=trace_file.parse_trace, default="azure")
    parser.add_argument("--rate", type=numbers, default=[2, 4, 8, 16], help="requests a second")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(n) for n in numbers(text)], default=[1, 8, 64]
    )
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at a rate")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "suite")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serving.jsonl")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print and record."""
    options = parse_args()
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"serving_peers: modelmill serve needs {', '.join(missing)}; install modelmill[serve]"
        )
    setup = PeerSetup(options.work.resolve(), options.vllm, options.vllm_python, check=False)
    facts = {"device": device_name("cuda"), "versions": versions(), **provenance()}
    with contextlib.ExitStack() as stack:
        servers = []
        for server in start_servers(options, setup):
            stack.callback(server.close)
            servers.append(server)
        for server in servers:
            server.wait()
            setup.note(f"{server.name} serves")
        for server in servers:
            server.measure(ServingLoad([(256, 32)] * 32, concurrency=16, seed=1))
        for row in rows(options, servers, facts):
            print(line_of(row), flush=True)
            with options.out.open("a", encoding="utf-8") as sink:
                sink.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

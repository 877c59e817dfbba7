"""Measure the memory of builds beside what their plans say, each build in a process of its own.

    python -m tools.build_memory [CHECKPOINT [--option NAME=VALUE …]]

Without a checkpoint: nine builds of small random models. With one: that build. Linux only: the peak
is the system's own (VmHWM), resident pages of mapped files included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

LLAMA = {
    "model_type": "llama",
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GPT2 = {"model_type": "gpt2", "n_head": 8}


class BuildCase(NamedTuple):
    """A random model, the type its checkpoint is stored in, and the options of its build."""

    name: str
    config: dict[str, Any]
    stored: str
    options: dict[str, Any]


PLAIN = LLAMA | {"hidden_size": 384, "vocab_size": 16000, "num_hidden_layers": 2}
WIDE = LLAMA | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 2000,
    "num_hidden_layers": 1,
}
TALL = LLAMA | {"hidden_size": 128, "vocab_size": 120000, "num_hidden_layers": 1}
INT8 = {"quantization": "int8"}
SMALL = (
    BuildCase("llama bfloat16", PLAIN, "bfloat16", {"dtype": "bfloat16"}),
    BuildCase("llama float32 of bfloat16", PLAIN, "bfloat16", {"dtype": "float32"}),
    BuildCase("wide layers, int8", WIDE, "bfloat16", {"dtype": "bfloat16"} | INT8),
    BuildCase("wide vocabulary", TALL, "float16", {"dtype": "float16"}),
    BuildCase(
        "gpt2 float32",
        GPT2 | {"n_embd": 384, "n_layer": 2, "vocab_size": 30000},
        "float32",
        {"dtype": "float32"},
    ),
    BuildCase(
        "gpt2 int8",
        GPT2 | {"n_embd": 768, "n_layer": 1, "vocab_size": 8000},
        "float32",
        {"dtype": "float32"} | INT8,
    ),
)
"""Six builds of seconds."""

THIN = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": 2000,
    "num_hidden_layers": 1,
}
BATCHES = {"quantization": "smoothquant", "dtype": "bfloat16"}
CALIBRATED = tuple(
    BuildCase(
        f"calibrated, {batches} batches",
        THIN,
        "bfloat16",
        BATCHES | {"calibration_samples": 8 * batches},
    )
    for batches in (1, 4, 16)
)
"""Builds of seconds that differ in what their calibration reads: batches of 4,096 tokens."""


def make(case: BuildCase, folder: Path) -> Path:
    """Write a random checkpoint of a case."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.config)
    AutoModelForCausalLM.from_config(config).to(getattr(torch, case.stored)).save_pretrained(folder)
    return folder


def measure(checkpoint: Path, options: dict[str, Any]) -> dict[str, int]:
    """Plan and build in a fresh process: {"planned", "measured"} bytes at the peak."""
    job = json.dumps({"checkpoint": str(checkpoint), "options": options})
    done = subprocess.run(
        [sys.executable, "-m", "tools.build_memory", "--one", job],
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_build(job: str) -> None:
    """In the fresh process: the build as the command line does it, and the two figures."""
    import psutil

    from modelmill.accept.run import run_engine_acceptance
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_build_plan
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.core.config import BuildConfig

    job_args = json.loads(job)
    plan = make_build_plan(
        open_checkpoint(Path(job_args["checkpoint"])),
        BuildConfig(target="cpu", **job_args["options"]),
    )
    planned = plan.build_memory.peak_bytes
    with tempfile.TemporaryDirectory() as folder:
        build(
            plan,
            Path(folder) / "model.engine",
            lambda staged, made: run_engine_acceptance(staged, made.checkpoint),
        )
    assert psutil.LINUX, "the peak of a process is read from /proc"
    status = Path("/proc/self/status").read_text()
    peak = next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )
    print(json.dumps({"planned": planned, "measured": peak}))


def halves(option: str) -> tuple[str, str]:
    """NAME=VALUE, divided."""
    name, _, value = option.partition("=")
    return name, value


def main() -> int:
    """The table; 1 where a plan is off by more than 15 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="field of BuildConfig"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_build(options.one)
        return 0
    table = Table(
        "build", "planned MiB", "measured MiB", "off", title="Memory of builds at their peak"
    )
    worst, cases = 0.0, SMALL + CALIBRATED
    with tempfile.TemporaryDirectory() as folder:
        if options.checkpoint:
            build_options = {
                name: int(value) if value.isdecimal() else value
                for name, value in map(halves, options.option)
            }
            rows = [(options.checkpoint.name, measure(options.checkpoint, build_options))]
        else:
            made = [make(case, Path(folder) / str(number)) for number, case in enumerate(cases)]
            rows = [(case.name, measure(path, case.options)) for case, path in zip(cases, made)]
    for name, row in rows:
        off = row["planned"] / row["measured"] - 1
        worst = max(worst, abs(off))
        table.add_row(name, f"{row['planned'] >> 20}", f"{row['measured'] >> 20}", f"{off:+.1%}")
    Console().print(table)
    return int(worst > 0.15)


if __name__ == "__main__":
    sys.exit(main())

"""Time from process start to the first token, measured in new processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.core.errors import ModelmillError
from modelmill.core.progress_callback import Progress
from modelmill.eval.bench_targets import EngineTarget
from modelmill.eval.datasets import random_requests
from modelmill.eval.report import BenchResult, MeasurementStats

TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class StartupTimes(BenchResult):
    """Startup times in seconds.

    total: process start to first token; import, load and first are its parts, without the start of
    the process itself.
    """

    total_s: MeasurementStats
    import_s: MeasurementStats
    load_s: MeasurementStats
    first_s: MeasurementStats


def measure_startup(
    engine: Path,
    options: Mapping[str, Any],
    *,
    input_length: int,
    runs: int,
    on_progress: Progress | None = None,
) -> StartupTimes:
    """Start ``runs`` processes one after another, after one that fills the file cache.

    Args:
        engine: the engine folder.
        options: fields of RunConfig.
        input_length: tokens of the prompt.
        runs: number of measured processes.
        on_progress: called with ("startup", processes ended, number of processes).

    Raises:
        ModelmillError: if a process fails.
    """
    results: list[Mapping[str, float]] = []
    for number in range(-1, runs):
        stages = _run_startup_process(engine, options, input_length)
        if number >= 0:
            results.append(stages)
        if on_progress is not None:
            on_progress("startup", number + 2, runs + 1)
    return StartupTimes(
        *[
            MeasurementStats.from_values([each[name] for each in results])
            for name in ("total", "import", "load", "first")
        ]
    )


def _run_startup_process(
    engine: Path, options: Mapping[str, Any], input_length: int
) -> dict[str, float]:
    spec = json.dumps({"engine": str(engine), "options": dict(options), "input": input_length})
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "modelmill.eval.startup", spec],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        total = time.perf_counter() - began
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if process.returncode or not line:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise ModelmillError(f"the started process failed: {last[0]}")
    return {**json.loads(line), "total": total}


def time_startup_stages(spec: str) -> dict[str, float]:
    """Load the engine in this process and generate one token; return seconds by stage."""
    began = time.perf_counter()
    from modelmill.core.config import RunConfig
    from modelmill.runtime.engine_core import EngineCore

    fields = json.loads(spec)
    imported = time.perf_counter()
    engine_core = EngineCore.open(Path(fields["engine"]), RunConfig(**fields["options"]))
    loaded = time.perf_counter()
    EngineTarget(engine_core).run(random_requests([(fields["input"], 1)], engine_core.vocab, 0))
    done = time.perf_counter()
    return {"import": imported - began, "load": loaded - imported, "first": done - loaded}


def main(argv: Sequence[str]) -> None:
    """Print the stages as one JSON line after the first token."""
    sys.stdout.write(json.dumps(time_startup_stages(argv[0])) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measure modelmill on this machine beside every peer that is installed: ``make bench``.

    python benchmarks/suite.py [--plan] [--shape NAME …] [--out FILE.jsonl] [--work DIR]
    [--vllm-python PYTHON | --vllm DIR] [--llamacpp-python PYTHON] [--gguf FILE] [--threads N]
    [--weight-format int4|int8|smoothquant|fp8] [--minutes N]

With a GPU: the smallest and the largest shape of ``benchmarks/suite_plan.py`` that fit twice, in
bfloat16 with random weights, beside vLLM and transformers. Without one: SmolLM2-135M from its GGUF
file, in int8 and in the file's own bits (``-q keep``), beside llama.cpp in five file types, which
llama.cpp itself writes, and beside transformers in float32. ``--plan`` prints what would be
measured, and what does not fit, and ends.

All sides of a work are open together and take turns call by call, with the same ids, timed by the
same code. Each line of the table is printed when it is known, and a row a side is then appended to
benchmarks/results/DEVICE.jsonl. A run that ends early, also by Ctrl-C, prints the table of what it
has; the same command then measures only what is missing, if the code and the machine are the same.
``--minutes`` (5 on a CPU, no limit on a GPU) gives each work a share of the time, which begins with
the first work: engines and files that are made on first use come before. Rounds become fewer, first
those of peers that take three times as long as the fastest one, then those of all other sides
alike; what is left out is named. A row has commit, device and its id, host, load, versions, the
number of rounds, and the seconds of every call.

The floor of a decode step is the bytes of modelmill's own weights and KV pages over the memory
bandwidth that the same run measured; the floor of a first token is the matrices' operations over
the rate of a large matrix product (twice that where both operands have 8 bits), or those bytes
where they take longer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import suite_plan  # noqa: E402
from benchmarks.append_rows import portable_command  # noqa: E402
from benchmarks.figure_statistics import LONG, SHORT, MeasuredFigure, speedup  # noqa: E402
from benchmarks.llamacpp_side import FILE_TYPES  # noqa: E402
from benchmarks.model_shapes import SHAPES, ShapeCost, shape_cost  # noqa: E402
from benchmarks.peer_process import PeerError, PeerProcess  # noqa: E402
from benchmarks.peer_setup import MODELMILL, SHARED_GPU_FRACTION, PeerSetup  # noqa: E402
from benchmarks.suite_budget import TimeBudget, rounds_that_fit, slow_peers  # noqa: E402
from benchmarks.suite_plan import CPU_SHAPE, Skipped  # noqa: E402
from benchmarks.suite_resume import MeasuredLine, find_unfinished_run  # noqa: E402
from benchmarks.synthetic_shapes import VLLM_FORMATS  # noqa: E402
from benchmarks.workloads import Workload, measure_in_turn  # noqa: E402
from modelmill.eval.provenance import git_commit, host_and_gpu_info  # noqa: E402

CPU_RECIPES = {"int8": "modelmill int8", "keep": "modelmill keep"}
CPU_CONTEXT = 1024
GPU_PEERS = {"vllm": "vLLM", "transformers": "transformers"}
FLOOR = "floor"
FLOOR_TOLERANCE = 1.02
"""A copy's rate of memory is a per cent below that of reads."""
FORMATS_WITH_8_BIT_INPUTS = ("fp8", "smoothquant")
MAX_NUM_SEQS = 256
"""Of both sides, whatever the batch: vLLM's default, from which it chooses its CUDA graphs."""
BUSY_LOAD = 1.5
"""Of a core, before a work begins: our own sides, which take turns, load each with 1."""
CPU_MINUTES = 5.0
"""In which a laptop has a table."""
FIRST_TOKEN_ROUNDS = 3
"""Times the rounds of decode: a first token is one short call."""


@dataclass(frozen=True)
class DeviceLimits:
    """What the device gives, measured in this run: bytes and operations a second."""

    name: str
    bytes_per_s: float
    operations_per_s: float | None

    def floor_ms(
        self, work: Workload, step_bytes: float, cost: ShapeCost, *, in_8_bits: bool = False
    ) -> float:
        """Milliseconds that a work needs at least.

        Args:
            work: decode or first token.
            step_bytes: bytes of the weights that every step reads.
            cost: of the model's shape.
            in_8_bits: whether both operands of products are, which doubles the rate.
        """
        prompt, batch = work.prompts[0], len(work.prompts)
        if len(work.outputs) > 1:
            context = prompt + (SHORT + LONG) / 2
            return 1e3 * (step_bytes + batch * context * cost.kv_bytes) / self.bytes_per_s
        read = step_bytes / self.bytes_per_s
        if self.operations_per_s is None:
            return 1e3 * read
        rate = self.operations_per_s * (2 if in_8_bits else 1)
        return 1e3 * max(read, cost.prefill_operations(prompt) / rate)


def measure_limits(device: str) -> DeviceLimits:
    """Time a copy or read of memory and a large bfloat16 product (float32 on a CPU)."""
    import torch

    from modelmill.eval.report import device_name
    from modelmill.ops import timing

    print("measuring the rates of memory and of products", file=sys.stderr, flush=True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return DeviceLimits(
        device_name(device),
        timing.measure_memory_bandwidth(device),
        timing.matmul_throughput(device, dtype),
    )


class Suite:
    """One run: its rows, and the lines of its table."""

    def __init__(
        self,
        options: argparse.Namespace,
        limits: DeviceLimits,
        planned: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Begin a run, or take up the last one if it was interrupted.

        Args:
            options: the command line.
            limits: of the device.
            planned: (shape, work) in order.
        """
        self.options, self.limits = options, limits
        self.setup = PeerSetup(
            options.work.resolve(), options.vllm, options.vllm_python,
            check=not options.no_check, weight_format=options.weight_format,
        )  # fmt: skip
        self.made_by = {"commit": options.commit or git_commit(), **host_and_gpu_info()}
        self.run = datetime.now(UTC).strftime("suite-%Y%m%dT%H%M%S")
        self.out = options.out or ROOT / "benchmarks" / "results" / f"{slug(limits.name)}.jsonl"
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.command = portable_command("suite", sys.argv[1:])
        self.lines: list[MeasuredLine] = []
        self.skipped: list[Skipped] = []
        self._too_slow: set[str] = set()  # peers that were left out of a decode work
        self._most_load = 0.0
        self._planned = planned
        identity = {**self.made_by, "device": limits.name, "command": self.command}
        unfinished = find_unfinished_run(self.out, identity, planned, datetime.now(UTC))
        if unfinished is not None:
            self.run = unfinished.run
            self.lines += unfinished.lines
            self.setup.note(f"taking up {self.run}, which has {len(self.lines)} lines")
            for line in self.lines:
                self._print_line(line)

    def missing(self, shape: str, works: Sequence[Workload]) -> list[Workload]:
        """The works of a shape that no interrupted run has measured."""
        measured = {(line.shape, line.work) for line in self.lines}
        return [work for work in works if (shape, work.name) not in measured]

    def measure(
        self, shape: str, works: Sequence[Workload], sides: Sequence[PeerProcess], step_bytes: float
    ) -> None:
        """Measure a shape's works, all sides in turn; rows are written one by one."""
        cost = shape_cost(SHAPES[shape])
        budget: TimeBudget = self.options.budget
        budget.begin()
        for work in works:
            if budget.is_over() and self.lines:
                reason = f"the {budget.minutes:g} minutes are over; {self._how_to_go_on()}"
                self.skipped.append(Skipped(f"{shape} {work.name}", reason))
                continue
            load = round(os.getloadavg()[0], 2)
            self._most_load = max(self._most_load, load)
            rounds = self.options.rounds * (1 if len(work.outputs) > 1 else FIRST_TOKEN_ROUNDS)
            in_turn = self._sides_in_time(shape, work, sides)
            self.setup.note(f"{shape} {work.name}: {len(in_turn)} sides in turn")
            figures = measure_in_turn(
                work, in_turn, rounds,
                goes_on=functools.partial(self._goes_on, shape, work),
                choose_rounds=functools.partial(self._choose_rounds, shape, work, rounds),
                on_round=functools.partial(self._note_round, shape, work),
            )  # fmt: skip
            in_8_bits = self.options.weight_format in FORMATS_WITH_8_BIT_INPUTS
            floor = self.limits.floor_ms(work, step_bytes, cost, in_8_bits=in_8_bits)
            self.lines.append(MeasuredLine(shape, work.name, floor, figures))
            self._print_line(self.lines[-1])
            with self.out.open("a", encoding="utf-8") as sink:
                if self._ends_inside_a_row():
                    sink.write("\n")
                for side in (each for each in sides if each.name in figures):
                    row = self._row(shape, work, side, figures[side.name], floor)
                    sink.write(json.dumps(row | {"load_1m": load}, ensure_ascii=False) + "\n")

    def _ends_inside_a_row(self) -> bool:
        """Whether the machine stopped while a row was written."""
        return self.out.read_bytes()[-1:] not in (b"", b"\n")

    def _sides_in_time(
        self, shape: str, work: Workload, sides: Sequence[PeerProcess]
    ) -> list[PeerProcess]:
        """The sides but for peers for which an earlier, shorter decode work had no time."""
        late = self._too_slow if len(work.outputs) > 1 else set()
        for name in (side.name for side in sides if side.name in late):
            self.skipped.append(Skipped(f"{name} {shape} {work.name}", "too slow; see --minutes"))
        return [side for side in sides if side.name not in late]

    def _goes_on(self, shape: str, work: Workload, side: str, seconds: float) -> bool:
        """Whether a side takes part: a peer whose round takes more than what is left does not."""
        left = self.options.budget.left()
        if side.startswith(MODELMILL) or left is None or seconds <= left:
            self.setup.note(f"{shape} {work.name}: {side} is warming up, {seconds:.0f} s a round")
            return True
        reason = f"a round takes about {seconds:.0f} s, and {left:.0f} s were left; see --minutes"
        self.setup.note(f"{shape} {work.name}: going on without {side}: {reason}")
        if len(work.outputs) > 1:
            self._too_slow.add(side)
        self.skipped.append(Skipped(f"{side} {shape} {work.name}", reason))
        return False

    def _choose_rounds(
        self, shape: str, work: Workload, rounds: int, seconds_per_round: Mapping[str, float]
    ) -> dict[str, int]:
        """The rounds of each side in this work's share of the time, with a note."""
        measured = {(line.shape, line.work) for line in self.lines}
        works_left = sum(each not in measured for each in self._planned)
        share = self.options.budget.share(works_left)
        engines = [name for name in seconds_per_round if name.startswith(MODELMILL)]
        slow = slow_peers(seconds_per_round, engines)
        chosen = rounds_that_fit(seconds_per_round, rounds, share, slow)
        seconds = sum(count * seconds_per_round[name] for name, count in chosen.items())
        each = ", ".join(f"{name} {count}" for name, count in chosen.items())
        fewer = f", for the time: {each}" if min(chosen.values()) < rounds else ""
        self.setup.note(
            f"{shape} {work.name}: {max(chosen.values())} rounds{fewer}; about {seconds:.0f} s"
        )
        return chosen

    def _note_round(self, shape: str, work: Workload, done: int, rounds: int) -> None:
        self.setup.note(f"{shape} {work.name}: round {done} of {rounds}")

    @property
    def can_be_taken_up(self) -> bool:
        """Whether rows say what they measured: their code is a commit."""
        commit = self.made_by["commit"]
        return bool(commit) and not str(commit).endswith("-dirty")

    def _how_to_go_on(self) -> str:
        if not self.can_be_taken_up:
            return "give more with --minutes, since code with local changes is not taken up"
        return "the same command measures it, or give more with --minutes"

    def _print_line(self, line: MeasuredLine) -> None:
        """One line of the table, at once."""
        times = ", ".join(f"{name} {figure.value:.2f}" for name, figure in line.figures.items())
        ratio = best_ratio(line.figures)
        print(
            f"{line.shape} {line.work}: floor {floor_text(line.floor, line.figures)}, {times} ms; "
            f"best peer ÷ ours {ratio}",
            flush=True,
        )

    def _row(
        self, shape: str, work: Workload, side: PeerProcess, figure: MeasuredFigure, floor: float
    ) -> dict[str, Any]:
        calls = {name: [round(each, 5) for each in calls] for name, calls in figure.calls.items()}
        weights = self.options.weight_format
        of_format = {"weights": weights} if weights else {}
        return {
            "bench": "suite", "shape": shape, **of_format, "work": work.name, "subject": side.name,
            "value": figure.value, "unit": "ms", "floor": floor, "spread": figure.to_dict(),
            "calls_s": calls, "statistic": work.statistic, "run": self.run,
            "command": self.command, **side.facts, **self.made_by,
            "device": self.limits.name, "bytes_per_s": round(self.limits.bytes_per_s),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip

    def print_table(self, skipped: Sequence[Skipped]) -> None:
        """Milliseconds by side, the ratio of the best peer to the best of ours, and the floor.

        skipped: what did not fit, before what this run has left out.
        """
        from rich.console import Console
        from rich.table import Table

        console = Console(width=None if sys.stdout.isatty() else 160)
        for shape in dict.fromkeys(line.shape for line in self.lines):
            lines = [line for line in self.lines if line.shape == shape]
            names = list(dict.fromkeys(name for line in lines for name in line.figures))
            table = Table(title=f"{shape} on {self.limits.name}: ms, lower is better")
            for column in ("work", FLOOR, *names, "best peer ÷ ours"):
                table.add_column(column, justify="left" if column == "work" else "right")
            for line in lines:
                table.add_row(*table_cells(line.work, line.floor, line.figures, names))
            console.print(table)
        if any(floor_text(line.floor, line.figures) == "–" for line in self.lines):
            console.print(
                "floor –: this machine was busy while its rates were measured", soft_wrap=True
            )
        if self._most_load > BUSY_LOAD * self.made_by["host_cores"]:
            console.print(
                f"this machine was busy: load {self._most_load:g} on "
                f"{self.made_by['host_cores']} cores; measure again where it is not",
                soft_wrap=True,
            )
        skipped = [*skipped, *self.skipped]
        print_skipped(functools.partial(console.print, soft_wrap=True), skipped)
        console.print(f"rows: {self.out}", soft_wrap=True)


def table_cells(
    work: str, floor: float, figures: Mapping[str, MeasuredFigure], names: Sequence[str]
) -> list[str]:
    """The cells of one line; the ratio is of the fastest peer and our fastest side."""
    cells = [
        f"{figures[name].value:.2f} ({figures[name].min:.2f}–{figures[name].max:.2f})"
        if name in figures
        else "–"
        for name in names
    ]
    return [work, floor_text(floor, figures), *cells, best_ratio(figures)]


def floor_text(floor: float, figures: Mapping[str, MeasuredFigure]) -> str:
    """The floor; a dash where a side was clearly faster, so that it is none.

    The rates of memory and of products were measured on a busy machine then.
    """
    fastest = min(figure.value for figure in figures.values())
    return f"{floor:.2f}" if floor <= FLOOR_TOLERANCE * fastest else "–"


def best_ratio(figures: Mapping[str, MeasuredFigure]) -> str:
    """The fastest peer over our fastest side; a dash without one of them."""
    engines = [each for name, each in figures.items() if name.startswith(MODELMILL)]
    peers = [each for name, each in figures.items() if not name.startswith(MODELMILL)]

    def time_of(figure: MeasuredFigure) -> float:
        return figure.value

    if not engines or not peers:
        return "–"
    return f"{speedup(min(peers, key=time_of), min(engines, key=time_of)):.2f}"


def print_skipped(write: Callable[[str], object], skipped: Sequence[Skipped]) -> None:
    """What was not measured, a line each."""
    for each in skipped:
        write(f"not measured: {each.name}: {each.reason}")


def slug(device: str) -> str:
    """NVIDIA H200 → nvidia-h200: the name of a device's file of rows."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


# -- a GPU


def run_gpu(options: argparse.Namespace) -> int:
    """Plan by the card's memory, then measure every planned shape."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    plans, skipped = suite_plan.plan_gpu(memory, SHARED_GPU_FRACTION, options.shape, options.only)
    comparable = ("vllm",) if options.weight_format else tuple(GPU_PEERS)
    requested = {
        peer: side for peer, side in GPU_PEERS.items() if peer in (options.peer or comparable)
    }
    names = [MODELMILL, *(side for peer, side in requested.items() if has_peer(options, peer))]
    skipped += [Skipped(side, "not installed") for side in requested.values() if side not in names]
    if options.plan:
        for plan in plans:
            print(f"{plan.shape}: {', '.join(work.name for work in plan.works)}; {names}")
        print_skipped(print, skipped)
        return 0
    planned = [(plan.shape, work.name) for plan in plans for work in plan.works]
    suite = Suite(options, measure_limits("cuda"), planned)
    with table_at_the_end(suite, skipped):
        for plan in plans:
            if not (works := suite.missing(plan.shape, plan.works)):
                continue
            with suite.setup.open_peers(
                names, plan.shape, SHARED_GPU_FRACTION, MAX_NUM_SEQS
            ) as sides:
                dense = shape_cost(SHAPES[plan.shape]).step_bytes
                step_bytes = next(
                    (each for side in sides if (each := side.facts.get("weight_bytes"))), dense
                )
                suite.measure(plan.shape, works, sides, step_bytes)
    return 0


@contextlib.contextmanager
def table_at_the_end(suite: Suite, skipped: Sequence[Skipped]) -> Iterator[None]:
    """Print the table, also of a run that is interrupted, by Ctrl-C or by ``kill``."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        suite.print_table(skipped)
        missing = "code with local changes is not taken up"
        if suite.can_be_taken_up:
            missing = "the same command measures what is missing"
        raise SystemExit(f"interrupted; {missing}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    suite.print_table(skipped)


def has_peer(options: argparse.Namespace, package: str) -> bool:
    """Whether a peer was named, or this Python has its package."""
    if package == "vllm" and (options.vllm or options.vllm_python):
        return True
    return importlib.util.find_spec(package) is not None


# -- a CPU


def run_cpu(options: argparse.Namespace) -> int:
    """SmolLM2 from its GGUF file, beside llama.cpp's own file types."""
    python = options.llamacpp_python or (
        sys.executable if importlib.util.find_spec("llama_cpp") else None
    )
    works = [
        work for work in suite_plan.works_for_cpu() if not options.only or work.name in options.only
    ]
    absent = "llama-cpp-python is not installed; docs/reproduce.md says how, and --llamacpp-python"
    skipped = [] if python else [Skipped("llama.cpp", absent)]
    if not has_peer(options, "transformers"):
        skipped.append(Skipped("transformers", "not installed"))
    if options.plan:
        print(f"{CPU_SHAPE}: {', '.join(work.name for work in works)}; threads {options.threads}")
        print_skipped(print, skipped)
        return 0
    gguf = options.gguf or pull_model(options.work)
    planned = [(CPU_SHAPE, work.name) for work in works]
    suite = Suite(options, measure_limits("cpu"), planned)
    works = suite.missing(CPU_SHAPE, works)
    with table_at_the_end(suite, skipped), contextlib.ExitStack() as stack:
        sides = []
        for side in cpu_sides(suite.setup, options, gguf, python):
            stack.callback(side.close)
            try:
                side.ready()
            except PeerError as error:
                if side.name.startswith(MODELMILL):
                    raise
                skipped.append(Skipped(side.name, str(error)))
                continue
            side.facts |= {"threads": options.threads, "model": gguf.name}
            suite.setup.note(f"{side.name} is ready")
            sides.append(side)
        engine = suite.setup.work / f"{gguf.stem}.int8.engine"
        suite.measure(CPU_SHAPE, works, sides, weight_bytes(engine))
    return 0


def cpu_sides(
    setup: PeerSetup, options: argparse.Namespace, gguf: Path, python: str | None
) -> Iterator[PeerProcess]:
    """Start ours in two recipes, llama.cpp in its file types, transformers in float32."""
    threads = options.threads
    run = {"device": "cpu", "threads": threads, "max_model_len": CPU_CONTEXT, "max_num_seqs": 1}
    for recipe, name in CPU_RECIPES.items():
        arguments: dict[str, Any] = {"engine": str(setup.cpu_engine(gguf, recipe)), "run": run}
        yield setup.start_module(name, sys.executable, "modelmill_peer", arguments)
    for file_type in FILE_TYPES if python else ():
        file = llamacpp_file(setup, str(python), gguf, file_type)
        arguments = {
            "gguf": str(file), "threads": threads, "n_ctx": CPU_CONTEXT, "n_seq_max": 1
        }  # fmt: skip
        yield setup.start_module(f"llama.cpp {file_type}", str(python), "llamacpp_side", arguments)
    if has_peer(options, "transformers"):
        arguments = {
            "config": str(setup.synthetic_config(CPU_SHAPE)), "dtype": "float32", "threads": threads
        }  # fmt: skip
        yield setup.start_module("transformers", sys.executable, "transformers_peer", arguments)


def llamacpp_file(setup: PeerSetup, python: str, gguf: Path, file_type: str) -> Path:
    """The checkpoint in a file type, written by llama.cpp on first use: from bfloat16 values."""
    if file_type == "q4_1" and "q4_1" in gguf.name.lower():
        return gguf
    target = setup.work / f"{gguf.stem}.{file_type}.gguf"
    if not target.exists():
        source = gguf if file_type == "bf16" else llamacpp_file(setup, python, gguf, "bf16")
        command = [
            python, "-m", "benchmarks.llamacpp_side", "quantize",
            str(source.resolve()), str(target), file_type,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        setup.note(f"{target.name} is written")
    return target


def weight_bytes(engine: Path) -> int:
    """Bytes of an engine's weight files; of a model with a tied head a step reads all of them."""
    return sum(file.stat().st_size for file in engine.rglob("*.safetensors"))


def pull_model(work: Path) -> Path:
    """SmolLM2's GGUF file, downloaded on first use by ``modelmill pull``."""
    command = [sys.executable, "-m", "modelmill", "pull", "smollm2", "-o", str(work / "models")]
    subprocess.run(command, cwd=ROOT, check=True)
    return next((work / "models").glob("*.gguf"))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plan", action="store_true", help="print what fits, measure nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where one is")
    parser.add_argument(
        "--shape", action="append", default=[], choices=sorted(SHAPES), help="default: what fits"
    )
    parser.add_argument("--only", action="append", help="only this work, decode-1x128 say")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of a work")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU: of every side"
    )
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's packages")
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM")
    parser.add_argument("--llamacpp-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct's file, if here already")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE.jsonl")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "suite", help="folder of engines and files"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="build without the acceptance run, to save time"
    )
    parser.add_argument("--peer", action="append", choices=tuple(GPU_PEERS), help="GPU: only these")
    parser.add_argument(
        "--weight-format",
        choices=("fp8", *VLLM_FORMATS),
        help="GPU, beside vLLM: how both sides hold their matrices; default: bfloat16",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of measuring, 0: no limit; default: {CPU_MINUTES:g} on a CPU, none on a GPU",
    )
    parser.add_argument("--commit", help="of this code, where it is no checkout")
    parser.set_defaults(budget=TimeBudget(None))
    options = parser.parse_args(arguments)
    others = {*(options.peer or ())} - {"vllm"}
    if options.weight_format and (others or options.device == "cpu"):
        parser.error(
            "--weight-format is for a GPU, where modelmill and vLLM hold their matrices so; leave "
            f"out {f'--peer {min(others)}' if others else '--device cpu'}"
        )
    return options


def main() -> int:
    """Measure on the GPU where there is one, otherwise on the CPU."""
    options = parse_args()
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.weight_format and device == "cpu":
        raise SystemExit("--weight-format is for a GPU, and there is none; leave it out")
    known = [
        work.name
        for work in (suite_plan.works_for_cpu() if device == "cpu" else suite_plan.works_for_gpu())
    ]
    if unknown := sorted({*(options.only or ())} - {*known}):
        raise SystemExit(f"--only {unknown[0]}: no such work on this device; {', '.join(known)}")
    default = CPU_MINUTES if device == "cpu" else None
    options.budget = TimeBudget(default if options.minutes is None else options.minutes or None)
    options.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    code = run_gpu(options) if device == "cuda" else run_cpu(options)
    if not options.plan:
        print(f"measured in {time.perf_counter() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())

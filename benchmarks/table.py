"""Measure the table of speed targets, part by part, modelmill and its peer in turn on one device.

    python benchmarks/table.py PART [PART …] [--peer DIR | --peer-python PYTHON] [--out FILE.jsonl]
    [--work DIR]

| part | what | peer |
|---|---|---|
| decode | time per token at five batch sizes and prompts, Qwen-7B's shape, bfloat16 | vLLM |
| first | first token of 1,024 and 4,096 tokens, batch 1 | vLLM |
| warm | the same once more; for after `decode`, whose last line heats the card | vLLM |
| marks | decode and first tokens in blocks, each side by itself, as the marks of the targets were taken | vLLM |
| trace | 500 requests of a conversation trace, all at once (--trace FILE|azure), by --order | vLLM |
| startup | process start to first token | vLLM |
| eager | decode at batch 1 | transformers |
| gpt2 | decode of GPT-2 medium's shape, float16, prompt 128, batch 1 and 64 | vLLM, transformers |

--peer DIR: a folder that holds vLLM's packages (for PYTHONPATH; its folder ``site`` where there is
one); otherwise --peer-python: an interpreter that has vLLM; with neither, only ours is measured.
The model is made and built once in --work. Both sides live on the card together and take turns call
by call (``marks``: block by block), with the same ids; only the trace and the start-up, which need
the whole card, give it to one side after the other. The parts that share the card run in the order
in which they are named: "first decode warm" begins on a cool card. Both sides' seconds become a
figure by the same function (``benchmarks/figure_statistics.py``). A row a side is appended to --out
as soon as it is known, with the commit (``--commit`` where this is no checkout), the card, its host
and the seconds of every call. ``--weights uniform``: all of them within 0.001, as vLLM makes
weights up; the targets' marks were taken on such.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trace_file, workloads  # noqa: E402
from benchmarks.append_rows import portable_command  # noqa: E402
from benchmarks.figure_statistics import MeasuredFigure, speedup  # noqa: E402
from benchmarks.make_checkpoint import NORMAL, UNIFORM  # noqa: E402
from benchmarks.peer_process import Lengths, PeerProcess  # noqa: E402
from benchmarks.peer_setup import MODELMILL, SHARED_GPU_FRACTION, SINGLE_GPU_FRACTION, PeerSetup  # noqa: E402
from benchmarks.targets import TARGETS  # noqa: E402
from benchmarks.workloads import PARTS, Workload, measure_in_blocks, measure_in_turn  # noqa: E402
from modelmill.eval.provenance import git_commit, host_and_gpu_info  # noqa: E402

ARRIVAL, LONGEST_FIRST = "arrival", "longest-first"


class SpeedTable:
    """One run of the script: its parts one after the other, and the rows that they give."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        peers = (options.peer, options.peer_python)
        self.variants = dict(map(parse_variant, options.also))
        more = {"layers": options.layers, "check": not options.no_check, "weights": options.weights}
        self.peer_setup = PeerSetup(options.work.resolve(), *peers, variants=self.variants, **more)
        self.made_by = {"commit": options.commit or git_commit(), **host_and_gpu_info()}
        self.run = datetime.now(UTC).strftime("table-%Y%m%dT%H%M%S")
        self.lines: list[tuple[str, dict[str, MeasuredFigure]]] = []

    def side_names(self, part: str) -> list[str]:
        """The sides of a part: ours, then its peers that are there."""
        has_vllm = self.options.peer is not None or self.options.peer_python is not None
        peers = workloads.PEERS_BY_PART.get(part, ("vLLM",))
        engines = [MODELMILL, *(self.variants if part == "trace" else ())]
        names = [*engines, *(peer for peer in peers if peer != "vLLM" or has_vllm)]
        return [name for name in names if not self.options.only or name in self.options.only]

    def run_parts(self, parts: Sequence[str], shape: str) -> None:
        """Parts whose sides share the card."""
        with self.peer_setup.open_peers(
            self.side_names(parts[0]), shape, SHARED_GPU_FRACTION, self.options.max_num_seqs
        ) as sides:
            for part in parts:
                facts = {side.name: side.facts for side in sides}
                for batch, prompt in (
                    self.options.mark or workloads.TARGET_MARKS if part == "marks" else ()
                ):
                    for work, figures in measure_in_blocks(
                        batch, prompt, sides, self.options.blocks
                    ):
                        self.record(part, work, figures, facts, order=workloads.BLOCKS)
                for work in workloads.workloads_for(part):
                    rounds = self.options.rounds * (3 if part in workloads.FIRST_TOKEN_PARTS else 1)
                    self.record(part, work, measure_in_turn(work, sides, rounds), facts)

    def run_trace(self) -> None:
        """The trace on the whole card, ours, then the peer, then ours again where time allows."""
        from modelmill.eval.datasets import sample_request_lengths

        if self.options.trace is None:
            raise SystemExit(
                "part trace needs --trace azure, or a csv with ContextTokens and GeneratedTokens"
            )
        lengths = order_requests(
            sample_request_lengths(self.options.trace, self.options.requests), self.options.order
        )
        ending = "" if self.options.order == ARRIVAL else f"-{self.options.order}"
        work = Workload(f"trace-{len(lengths)}{ending}", (), (0,), scale=1.0)
        seconds: dict[str, list[float]] = {}
        facts: dict[str, Any] = {}
        names = self.side_names("trace")
        again = [name for name in names if name == MODELMILL and len(names) > 1]
        for number, name in enumerate([*names, *again]):
            runs = 2 if number < len(names) else 1
            if number >= len(names) and not self.has_time_for(sum(seconds[name])):
                break
            with self.peer_setup.open_peers([name], "qwen-7b", SINGLE_GPU_FRACTION) as sides:
                for side in sides:
                    facts[name] = side.facts
                    seconds.setdefault(name, []).extend(self._served(side, lengths, runs))
        figures = {name: work.figure({0: values}) for name, values in seconds.items()}
        more = {
            "order": self.options.order,
            "requests": len(lengths),
            "input": sum(p for p, _ in lengths),
            "output": sum(o for _, o in lengths),
        }
        self.record("trace", work, figures, facts, **more)

    def _served(self, side: PeerProcess, lengths: Lengths, runs: int) -> list[float]:
        side.generate(workloads.warm_up(lengths), seed=1)
        timings = []
        for number in range(runs):
            timings.append(side.generate(lengths, seed=2 + number))
            self.peer_setup.note(f"{side.name}: {timings[-1]:.2f} s")
        return timings

    def run_startup(self) -> None:
        """Time fresh processes in turn; the first of each side only warms caches if needed."""
        work = Workload("startup", (128,), (1,), scale=1.0)
        seconds: dict[str, list[float]] = {name: [] for name in self.side_names("startup")}
        facts: dict[str, Any] = {}
        self.peer_setup.engine("qwen-7b")
        warm = {"decode", "first", "marks", "trace"} & set(self.options.parts)
        for turn in range(0 if warm else -1, self.options.starts):
            for name in seconds:
                side = self.peer_setup.start_peer(name, "qwen-7b", SINGLE_GPU_FRACTION)
                with contextlib.closing(side):
                    facts[name] = side.ready()
                    side.generate([(128, 1)], seed=turn)
                    took = time.perf_counter() - side.start_time
                self.peer_setup.note(
                    f"{name} started in {took:.1f} s{'' if turn >= 0 else ' (not counted)'}"
                )
                if turn >= 0:
                    seconds[name].append(took)
        self.record(
            "startup",
            work,
            {name: work.figure({1: values}) for name, values in seconds.items()},
            facts,
        )

    def has_time_for(self, seconds: float) -> bool:
        """Whether that much more still ends before --limit."""
        return time.perf_counter() - self.peer_setup.began + seconds < self.options.limit

    def record(
        self,
        section: str,
        work: Workload,
        figures: dict[str, MeasuredFigure],
        facts: Mapping[str, Mapping[str, Any]],
        **more: Any,
    ) -> None:
        """Keep a line for the table and append its rows."""
        self.lines.append((work.name, figures))
        shown = ", ".join(f"{name} {figure.value:.3f}" for name, figure in figures.items())
        self.peer_setup.note(f"{work.name}: {shown}")
        with self.options.out.open("a", encoding="utf-8") as sink:
            for name, figure in figures.items():
                row = self._row(section, work, name, figure, facts[name]) | more
                sink.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _row(
        self, part: str, work: Workload, name: str, figure: MeasuredFigure, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        more = {"layers": self.options.layers} if self.options.layers else {}
        more |= {"weights": self.options.weights} if self.options.weights != NORMAL else {}
        more |= {"options": self.variants[name]} if name in self.variants else {}
        target = TARGETS.get(work.name)
        return {
            "bench": "table", "part": part, "work": work.name, "subject": name,
            "value": figure.value,
            "unit": target.unit if target else "s" if work.scale == 1 else "ms",
            "spread": figure.to_dict(),
            "calls_s": {name: [round(each, 5) for each in calls] for name,
            calls in figure.calls.items()},
            "statistic": work.statistic, "run": self.run,
            "command": portable_command("table", sys.argv[1:]), **facts,
            **self.made_by, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **more,
        }  # fmt: skip

    def print_tables(self) -> None:
        """The tables of this run."""
        from rich.console import Console
        from rich.table import Table

        console = Console(width=160)
        if self.lines:
            table = Table(title=f"{self.run}: lower is better; (least … most) of the rounds")
            peers = list(
                dict.fromkeys(
                    name for _, figures in self.lines for name in figures if name != MODELMILL
                )
            )
            for column in ("work", "unit", "floor", "must", MODELMILL, *peers, "× ours"):
                table.add_column(column, justify="left" if column == "work" else "right")
            for name, figures in self.lines:
                table.add_row(*table_line(name, figures, peers))
            console.print(table)


def table_line(name: str, figures: Mapping[str, MeasuredFigure], peers: Sequence[str]) -> list[str]:
    """The cells of one line of the printed table."""
    target = TARGETS.get(name)
    about = (
        [target.title, target.unit, _plain(target.floor), _plain(target.required)]
        if target
        else [name, "", "", ""]
    )
    over = [
        speedup(figures[peer], figures[MODELMILL])
        for peer in peers
        if peer in figures and MODELMILL in figures
    ]
    cells = [
        format_spread(figures[side]) if side in figures else "–" for side in (MODELMILL, *peers)
    ]
    return [*about, *cells, " ".join(f"{each:.2f}×" for each in over) or "–"]


def format_spread(figure: MeasuredFigure) -> str:
    """4.21 (4.20 … 4.23), in three digits or more."""
    digits = 3 if figure.value < 1 else 2 if figure.value < 20 else 1
    return f"{figure.value:.{digits}f} ({figure.min:.{digits}f} … {figure.max:.{digits}f})"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def order_requests(lengths: Lengths, order: str) -> Lengths:
    """Return the requests for both sides: in order of arrival, or longest answers first."""
    return lengths if order == ARRIVAL else sorted(lengths, key=lambda pair: -pair[1])


def parse_mark(text: str) -> tuple[int, int]:
    """1x4096 → (1, 4096)."""
    (pair,) = workloads.parse_pairs(text)
    return pair


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """modelmill-int8kv={"…": …} → its name and fields of RunConfig."""
    name, _, fields = text.partition("=")
    return name, dict(json.loads(fields))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--peer", type=Path, help="folder of vLLM's packages")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has the peer")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200.jsonl")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "out" / "table",
        help="where models are made and logs lie",
    )
    parser.add_argument("--trace", type=trace_file.parse_trace, help=trace_file.HELP)
    parser.add_argument("--requests", type=int, default=500, help="of the trace")
    parser.add_argument(
        "--order", choices=(ARRIVAL, LONGEST_FIRST), default=ARRIVAL, help="trace: of both sides"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="of both sides, where they share the card"
    )
    parser.add_argument("--commit", help="of this code, where it is no checkout")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="measured rounds of a line (first, warm: three times as many)",
    )
    parser.add_argument(
        "--mark",
        action="append",
        type=parse_mark,
        metavar="BxP",
        help="marks: only these, 1x4096 say",
    )
    parser.add_argument("--blocks", type=int, default=2, help="marks: blocks of each side")
    parser.add_argument(
        "--weights",
        choices=(NORMAL, UNIFORM),
        default=NORMAL,
        help="as make_checkpoint.py draws them",
    )
    parser.add_argument("--starts", type=int, default=2, help="counted starts of each side")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="trace: ours with RunConfig fields",
    )
    parser.add_argument(
        "--limit", type=float, default=570, help="seconds; ours is measured again only within them"
    )
    parser.add_argument(
        "--only", action="append", help="only this side: modelmill, vLLM or transformers"
    )
    parser.add_argument("--no-check", action="store_true", help="build without the acceptance run")
    parser.add_argument(
        "--layers", type=int, help="fewer layers, for a dry run; do not publish such rows"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Run the parts, print the table."""
    options = parse_args()
    bench = SpeedTable(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shared = [
            part
            for part in options.parts
            if part in ("decode", "marks", *workloads.FIRST_TOKEN_PARTS)
        ]
        if shared:
            bench.run_parts(shared, "qwen-7b")
        for part, shape in (("eager", "qwen-7b"), ("gpt2", "gpt2-medium")):
            if part in options.parts:
                bench.run_parts([part], shape)
        for part, measure in (
            ("trace", bench.run_trace),
            ("startup", bench.run_startup),
        ):
            if part in options.parts:
                measure()
    finally:
        bench.print_tables()


if __name__ == "__main__":
    main()

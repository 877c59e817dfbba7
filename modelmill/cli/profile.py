"""``modelmill profile``: where a step's time goes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine import ENGINE_HELP, CacheBuild, open_llm
from modelmill.cli.options import Common, config
from modelmill.cli.output import emit_json, note, progress, table
from modelmill.core.config import RunConfig, option
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.eval.profile import Profile
    from modelmill.eval.profile_lines import Line

HELP = "Show where a step's time goes, kernel by kernel, against what the device gives at most."
MORE = """decode: one token for each of a batch of sequences. prefill: their prompts, as one step.

Examples:

  modelmill profile model.engine --batch 8 --prompt 1024 --trace step.json

  modelmill profile model.engine --phase decode --json"""

PHASES = ("decode", "prefill", "both")


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """Which step, and where its trace goes."""

    engine: Path = option(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    phase: str = option("both", "which step", choices=PHASES)
    batch: int = option(1, "sequences computed together")
    prompt: int = option(128, "tokens of each prompt")
    lines: int = option(24, "lines of the table (0: all)")
    trace: Path | None = option(None, "write a trace that Perfetto (ui.perfetto.dev) opens", metavar="FILE.json")
    save: Path | None = option(None, "append the figures as rows", metavar="FILE.jsonl")
    build: CacheBuild = config(CacheBuild, "A checkpoint in the engine's place")
    run: RunConfig = config(RunConfig, "Engine")


def run(args: Args) -> int:
    """Measure the ceilings, then each phase; print, and write the trace."""
    from modelmill.eval import chrome
    from modelmill.eval.ceilings import in_words, measure, rates
    from modelmill.eval.profile import Work, profile
    from modelmill.eval.report import device_name
    from modelmill.runtime.device import pick_device, prepare, use_threads

    if args.batch < 1 or args.prompt < 1 or args.lines < 0:
        raise UsageError("--batch and --prompt must be at least 1, --lines at least 0")
    if args.trace is not None:
        chrome.check_place(args.trace)  # before anything is measured
    device = pick_device(args.run.device)
    if device == "cpu":
        use_threads(args.run.threads)
    with progress("measuring the device", lines=True) as told:
        prepare(args.run.device, told)
        ceilings = measure(device, [])  # before the engine takes the memory
    loop = open_llm(args.engine, args.build, args.run).loop
    ceilings = replace(ceilings, products=rates(device, [loop.dtype]))
    build = loop.artifact.manifest.build  # type: ignore[union-attr]
    about = {"engine": str(args.engine), "device": device_name(loop.device)}
    about |= {"dtype": build["dtype"], "quantization": build["quantization"]}
    phases = ("prefill", "decode") if args.phase == "both" else (args.phase,)
    found, tracks = [], {}
    with progress("profile", quiet=args.json) as told:
        for number, phase in enumerate(phases):
            each, events = profile(loop, Work(phase, args.batch, args.prompt), ceilings)
            found.append(each)
            tracks[f"{phase}, {args.batch} × {args.prompt}"] = events
            told("profile", number + 1, len(phases))
    if args.trace is not None:
        chrome.write(args.trace, chrome.trace(tracks, {**about, **ceilings.to_dict()}))
    rows = _rows(shlex.join(["modelmill", *sys.argv[1:]]), about, ceilings.to_dict(), found)
    if args.save is not None:
        from modelmill.eval.report import save

        save(args.save, rows)
    if args.json:
        phases_told = [each.to_dict() for each in found]
        emit_json({**about, "ceilings": ceilings.to_dict(), "kernels": dict(loop.ops.chosen), "phases": phases_told})
        return 0
    print(f"{args.engine} ({about['dtype']}, {about['quantization']}) on {about['device']}; at most ", end="")
    told_rates = in_words({name: rate / 1e12 for name, rate in ceilings.products.items()})
    print(f"{ceilings.memory / 1e9:,.0f} GB/s and {told_rates}")
    for each in found:
        show(each, args.lines)
    if args.trace is not None:
        note(f"wrote {args.trace}: open it at ui.perfetto.dev")
    return 0


def _rows(command: str, about: dict[str, Any], ceilings: dict[str, Any], found: list[Profile]) -> list[dict[str, Any]]:
    from modelmill.eval.report import row

    rows = []
    for each in found:
        figures = {"floor_us": each.floor_us, "gap_us": each.gap_us, "how": each.how}
        work = {"batch": each.batch, "prompt": each.prompt}
        facts = {**{k: v for k, v in about.items() if k != "device"}, **work, **figures, "ceilings": ceilings}
        step = each.step_us
        rows.append(row(command, f"profile.{each.phase}_us", step.median, "us", about["device"], spread=step, **facts))
    return rows


def show(found: Profile, most: int) -> None:
    """The step and its lines for people."""
    step = found.step_us
    what = f"{found.phase}, {found.batch} × {found.prompt}"
    timed = {"graph": "as a CUDA graph", "launched": "launched by Python", "host": "on the CPU"}[found.how]
    kernels = "kernels" if found.how != "host" else "ops"
    title = (
        f"{what}: {_us(step.median)} µs {timed} ({_us(step.min)} … {_us(step.max)}); floor {_us(found.floor_us)} µs, "
        f"which is {found.floor_us / step.median:.0%} of that; between {kernels} {_us(found.gap_us)} µs"
    )
    if found.how != "host":
        title += f"; seen by the profiler: {_us(found.seen_us)} µs"
    print(f"\n{title}")
    _table(found.lines, most)
    if found.inside:
        print("The same step op by op, as where modules are watched or a kernel is switched:")
        _table(found.inside, most)


def _table(lines: tuple[Line, ...], most: int) -> None:
    shown = lines[: most or len(lines)]
    rows = [_cells(line) for line in shown]
    if len(lines) > len(shown):
        rest = lines[len(shown) :]
        us, share = sum(line.us for line in rest), sum(line.share for line in rest)
        calls = sum(line.calls for line in rest)
        rows.append([f"{len(rest)} more", "", "", calls, _us(us), f"{share:.1%}", *["–"] * 4])
    columns: tuple[str, ...] = (
        "module",
        "op",
        "kernel",
        "calls",
        "µs a step",
        "share",
        "MB",
        "GFLOP",
        "floor, µs",
        "of floor",
    )
    if all(not line.kernel for line in lines):
        rows = [[*row[:2], *row[3:]] for row in rows]
        columns = (*columns[:2], *columns[3:])
    table(columns, rows)


def _cells(line: Line) -> list[Any]:
    head = [line.module or "(model)", line.op or "–", _shortened(line.kernel), line.calls, _us(line.us)]
    if line.floor_us is None:
        return [*head, f"{line.share:.1%}", *["–"] * 4]
    nbytes, operations = (line.nbytes or 0) / 1e6, (line.operations or 0) / 1e9
    reached = "–" if line.fraction is None else f"{line.fraction:.0%}"
    return [*head, f"{line.share:.1%}", _few(nbytes), _few(operations), _us(line.floor_us), reached]


def _shortened(kernel: str) -> str:
    """Names of templates are longer than a screen; the trace has them whole."""
    name = kernel.removeprefix("void ").split("<")[0].split("(")[0]
    return name if len(name) <= 48 else f"{name[:47]}…"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 else "–"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

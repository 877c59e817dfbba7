"""``modelmill profile``: where a step's time goes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions, open_llm
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_json, print_note, print_table, show_progress
from modelmill.core.config import RunConfig, option_field, path_option_field
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.eval.profile import Profile
    from modelmill.eval.profile_lines import ProfileLine

HELP = "Show where a step's time goes, kernel by kernel, against what the device gives at most."
EPILOG = """decode: one token for each of a batch of sequences. prefill: their prompts, as one step.

Examples:

  modelmill profile model.engine --batch 8 --prompt 1024 --trace step.json

  modelmill profile model.engine --phase decode --json"""

PHASE_CHOICES = ("decode", "prefill", "both")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill profile``."""

    engine: Path = option_field(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    phase: str = option_field("both", "which step", choices=PHASE_CHOICES)
    batch: int = option_field(1, "sequences computed together")
    prompt: int = option_field(128, "tokens of each prompt")
    lines: int = option_field(24, "lines of the table (0: all)")
    trace: Path | None = path_option_field(
        "write a trace that Perfetto (ui.perfetto.dev) opens", "FILE.json"
    )
    save: Path | None = path_option_field("append the figures as rows", "FILE.jsonl")
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in the engine's place"
    )
    run: RunConfig = config_field(RunConfig, "Engine")


def run(args: Args) -> int:
    """Measure the ceilings, then each phase; print, and write the trace."""
    from modelmill.eval import chrome_trace
    from modelmill.eval.profile import ProfileCase, profile_case
    from modelmill.eval.report import device_name
    from modelmill.eval.roofline import format_matmul_rates, measure_matmul_rates, measure_roofline
    from modelmill.loader.device import ensure_cpu_kernels_compiled, resolve_device, set_cpu_threads

    if args.batch < 1 or args.prompt < 1 or args.lines < 0:
        raise UsageError("--batch and --prompt must be at least 1, --lines at least 0")
    if args.trace is not None:
        chrome_trace.check_trace_overwrite(args.trace)  # before anything is measured
    device = resolve_device(args.run.device)
    if device == "cpu":
        set_cpu_threads(args.run.threads)
    with show_progress("measuring the device", lines=True) as on_progress:
        ensure_cpu_kernels_compiled(args.run.device, on_progress)
        ceilings = measure_roofline(device, [])  # before the engine takes the memory
    loop = open_llm(args.engine, args.build, args.run).engine_core
    ceilings = replace(ceilings, matmul_rates=measure_matmul_rates(device, [loop.dtype]))
    build = loop.artifact.manifest.build  # type: ignore[union-attr]
    about = {"engine": str(args.engine), "device": device_name(loop.device)}
    about |= {"dtype": build["dtype"], "quantization": build["quantization"]}
    phases = ("prefill", "decode") if args.phase == "both" else (args.phase,)
    profiles, tracks = [], {}
    with show_progress("profile", quiet=args.json) as on_progress:
        for number, phase in enumerate(phases):
            each, events = profile_case(loop, ProfileCase(phase, args.batch, args.prompt), ceilings)
            profiles.append(each)
            tracks[f"{phase}, {args.batch} × {args.prompt}"] = events
            on_progress("profile", number + 1, len(phases))
    if args.trace is not None:
        chrome_trace.write_trace(
            args.trace, chrome_trace.make_trace(tracks, {**about, **ceilings.to_dict()})
        )
    rows = _make_result_rows(
        shlex.join(["modelmill", *sys.argv[1:]]), about, ceilings.to_dict(), profiles
    )
    if args.save is not None:
        from modelmill.eval.report import append_rows

        append_rows(args.save, rows)
    if args.json:
        phase_dicts = [each.to_dict() for each in profiles]
        kernels = dict(loop.ops.backends)
        print_json(
            {**about, "ceilings": ceilings.to_dict(), "kernels": kernels, "phases": phase_dicts}
        )
        return 0
    print(
        f"{args.engine} ({about['dtype']}, {about['quantization']}) on {about['device']}; at most ",
        end="",
    )
    rates = format_matmul_rates({name: rate / 1e12 for name, rate in ceilings.matmul_rates.items()})
    print(f"{ceilings.memory_bandwidth / 1e9:,.0f} GB/s and {rates}")
    for each in profiles:
        show_profile(each, args.lines)
    if args.trace is not None:
        print_note(f"wrote {args.trace}: open it at ui.perfetto.dev")
    return 0


def _make_result_rows(
    command: str, about: dict[str, Any], ceilings: dict[str, Any], profiles: list[Profile]
) -> list[dict[str, Any]]:
    from modelmill.eval.report import make_row

    rows = []
    for each in profiles:
        figures = {"floor_us": each.floor_us, "gap_us": each.gap_us, "how": each.how}
        work = {"batch": each.batch, "prompt": each.prompt}
        facts = {
            **{k: v for k, v in about.items() if k != "device"},
            **work,
            **figures,
            "ceilings": ceilings,
        }
        step = each.step_us
        rows.append(
            make_row(
                command,
                f"profile.{each.phase}_us",
                step.median,
                "us",
                about["device"],
                spread=step,
                **facts,
            )
        )
    return rows


def show_profile(profile: Profile, max_lines: int) -> None:
    """Print a step and the table of its kernels."""
    step = profile.step_us
    what = f"{profile.phase}, {profile.batch} × {profile.prompt}"
    timed = {"graph": "as a CUDA graph", "launched": "launched by Python", "host": "on the CPU"}[
        profile.how
    ]
    kernels = "kernels" if profile.how != "host" else "ops"
    title = (
        f"{what}: {_format_us(step.median)} µs {timed} ({_format_us(step.min)} … "
        f"{_format_us(step.max)}); "
        f"floor {_format_us(profile.floor_us)} µs, "
        f"which is {profile.floor_us / step.median:.0%} of that; between {kernels} "
        f"{_format_us(profile.gap_us)} µs"
    )
    if profile.how != "host":
        title += f"; seen by the profiler: {_format_us(profile.seen_us)} µs"
    print(f"\n{title}")
    _print_kernel_table(profile.lines, max_lines)
    if profile.inside:
        print("The same step op by op, as where modules are watched or a kernel is switched:")
        _print_kernel_table(profile.inside, max_lines)


def _print_kernel_table(lines: tuple[ProfileLine, ...], max_lines: int) -> None:
    shown = lines[: max_lines or len(lines)]
    rows = [_kernel_row_cells(line) for line in shown]
    if len(lines) > len(shown):
        rest = lines[len(shown) :]
        us, share = sum(line.us for line in rest), sum(line.share for line in rest)
        calls = sum(line.calls for line in rest)
        rows.append(
            [f"{len(rest)} more", "", "", calls, _format_us(us), f"{share:.1%}", *["–"] * 4]
        )
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
    print_table(columns, rows)


def _kernel_row_cells(line: ProfileLine) -> list[Any]:
    head = [
        line.module or "(model)",
        line.op or "–",
        _shorten_name(line.kernel),
        line.calls,
        _format_us(line.us),
    ]
    if line.floor_us is None:
        return [*head, f"{line.share:.1%}", *["–"] * 4]
    nbytes, operations = (line.nbytes or 0) / 1e6, (line.operations or 0) / 1e9
    reached = "–" if line.fraction is None else f"{line.fraction:.0%}"
    return [
        *head,
        f"{line.share:.1%}",
        _format_amount_or_dash(nbytes),
        _format_amount_or_dash(operations),
        _format_us(line.floor_us),
        reached,
    ]


def _shorten_name(kernel: str) -> str:
    """Shorten a kernel's name; template names are longer than a line. The trace has full names."""
    name = kernel.removeprefix("void ").split("<")[0].split("(")[0]
    return name if len(name) <= 48 else f"{name[:47]}…"


def _format_amount_or_dash(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 else "–"


def _format_us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

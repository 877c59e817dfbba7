"""``bench ops``: every kernel against what the device gives at most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.output import print_table, show_progress
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import most_similar_name

if TYPE_CHECKING:
    from modelmill.eval.op_bench import OpTiming

TABLE_COLUMNS = (
    "op",
    "case",
    "variant",
    "µs (min … max)",
    "GB/s",
    "TFLOP/s",
    "bound by",
    "of ceiling",
    "timed by",
)


MIN_PLOTTED_ROOFLINE_FRACTION = 0.05  # of the ceiling: below, a launch takes all the time


def check_bench_ops_options(
    engine: Path | None, ops: Sequence[str], implementations: Sequence[str]
) -> None:
    """Check the names of ops and variants.

    Raises:
        UsageError: if an op or a variant is unknown, or an engine is given.
    """
    from modelmill.ops import registry

    if engine is not None:
        raise UsageError(f"bench ops takes no engine ({engine}); name ops with --op")
    known = registry.op_names()
    for op in ops:
        if op not in known:
            hint = most_similar_name(op, list(known))
            more = f"did you mean {hint}?" if hint else f"known: {', '.join(known)}"
            raise UsageError(f"unknown op {op!r}; {more}")
    for variant in implementations:
        if variant not in ("torch", *registry.BACKENDS_BESIDES_TORCH):
            raise UsageError(
                f"--variant {variant!r} is not one of torch, "
                f"{', '.join(registry.BACKENDS_BESIDES_TORCH)}"
            )


def measure_ops(args: Any) -> dict[str, Any]:
    """Time the selected ops; returns the facts that ``bench`` prints, saves and plots."""
    import torch

    from modelmill.eval.op_bench import OpBenchSelection, bench_ops
    from modelmill.eval.report import device_name
    from modelmill.eval.roofline import measure_roofline
    from modelmill.loader.device import ensure_cpu_kernels_compiled, resolve_device, set_cpu_threads
    from modelmill.ops import registry

    device = resolve_device(args.run.device)
    if device == "cpu":
        set_cpu_threads(args.run.threads)
    name = (
        args.build.dtype
        if args.build.dtype != "auto"
        else "float32"
        if device == "cpu"
        else "bfloat16"
    )
    dtype = getattr(torch, name)
    ops = registry.op_names()
    selection = OpBenchSelection(tuple(args.op), tuple(args.variant), args.case, args.runs)
    done: list[OpTiming] = []
    with torch.inference_mode(), show_progress("ops", quiet=args.json, lines=True) as on_progress:
        ensure_cpu_kernels_compiled(device, on_progress)
        ceilings = measure_roofline(device, [dtype])
        for each in bench_ops(ceilings, dtype, selection):
            done.append(each)
            on_progress(each.op, ops.index(each.op) + 1, len(ops))
    return {
        "what": "ops",
        "device": device_name(device),
        "dtype": name,
        "ceilings": ceilings.to_dict(),
        "results": [each.to_dict() for each in done],
    }


def make_op_rows(command: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of benchmarks/results for each time; what is not counted for a case is left out."""
    from modelmill.eval.report import make_row

    rows = []
    for each in results["results"]:
        us = each["us"]
        if us is None:
            continue
        fields = {
            name: each[name] for name in ("op", "dtype", "case", "variant", "chosen", "bound")
        }
        figures = {
            name: round(each[name], 4)
            for name in ("gbps", "tflops", "fraction")
            if each[name] is not None
        }
        spread = {"min": us["min"], "max": us["max"], "runs": us["runs"]}
        more = {
            "bench": "op",
            "timed": each["how"],
            "spread": spread,
            "ceilings": results["ceilings"],
        }
        rows.append(
            make_row(
                command,
                "op",
                round(us["median"], 3),
                "us",
                results["device"],
                **fields,
                **figures,
                **more,
            )
        )
    return rows


def show_op_times(results: dict[str, Any]) -> None:
    """Print a line per variant and case; ▸ marks the variant that engines use."""
    from modelmill.eval.roofline import format_matmul_rates

    ceilings = results["ceilings"]
    memory, rates = ceilings["memory_gbps"], format_matmul_rates(ceilings["products_tflops"])
    title = (
        f"ops in {results['dtype']} on {results['device']}; ceilings: {memory:.4g} GB/s, {rates}"
    )
    print_table(TABLE_COLUMNS, [_op_row_cells(each) for each in results["results"]], title=title)
    print(
        "▸ the variant that engines use; the ceiling is the larger of the times for the bytes and "
        "for the operations"
    )


def _op_row_cells(each: dict[str, Any]) -> list[Any]:
    head = [each["op"], each["case"], ("▸ " if each["chosen"] else "  ") + each["variant"]]
    if each["failed"]:
        return [*head, f"failed: {each['failed']}", *["–"] * 5]
    us, fraction = each["us"], each["fraction"]
    median, low, high = (_format_number(us[key]) for key in ("median", "min", "max"))
    time = f"{median} ({low} … {high})"
    rates = [_format_number_or_dash(each["gbps"]), _format_number_or_dash(each["tflops"])]
    return [
        *head,
        time,
        *rates,
        each["bound"] or "–",
        "–" if fraction is None else f"{fraction:.0%}",
        each["how"],
    ]


def _format_number_or_dash(value: float | None) -> str:
    return "–" if value is None else _format_number(value)


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot_op_fractions(axes: Any, results: dict[str, Any]) -> None:
    """A bar for each case of the picked variant: its fraction of the ceiling.

    What is but a launch is left out.
    """
    chosen = [
        each
        for each in results["results"]
        if each["chosen"] and (each["fraction"] or 0) >= MIN_PLOTTED_ROOFLINE_FRACTION
    ]
    names = [f"{each['op']} {each['case']} ({each['variant']})" for each in chosen]
    axes.figure.set_size_inches(9, max(4, 0.22 * len(names) + 1))
    axes.barh(range(len(names)), [each["fraction"] for each in chosen], color=_bar_colours(chosen))
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("fraction of the ceiling (blue: memory, orange: products)")
    axes.grid(alpha=0.3, axis="x")


def _bar_colours(chosen: Sequence[dict[str, Any]]) -> list[str]:
    return ["tab:blue" if each["bound"] == "memory" else "tab:orange" for each in chosen]

"""Results of ``bench`` as rows, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.cli.output import print_table

MEDIAN_MIN_MAX_LABEL = "median (min … max)"

BENCH_METRIC_UNITS = {
    "first_token_ms": "ms",
    "per_token_ms": "ms",
    "total_ms": "ms",
    "input_tokens_per_s": "tokens/s",
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "seconds": "s",
    "total_s": "s",
    "import_s": "s",
    "load_s": "s",
    "first_s": "s",
}


def make_result_rows(command: str, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per figure: its median, spread and workload."""
    from modelmill.eval.report import make_row

    rows = []
    about = {
        key: figures[key]
        for key in ("engine", "dtype", "quantization", "kernels")
        if key in figures
    }
    for result in figures["results"]:
        workload = {
            key: result[key]
            for key in ("shape", "requests", "input_tokens", "output_tokens")
            if key in result
        }
        for figure, unit in BENCH_METRIC_UNITS.items():
            spread = result.get(figure)
            if spread is not None:
                details = {**about, "subject": result["subject"], "spread": spread, **workload}
                name = f"{figures['what']}.{figure}"
                rows.append(
                    make_row(command, name, spread["median"], unit, figures["device"], **details)
                )
    return rows


def show_bench_table(bench_figures: Mapping[str, Any]) -> None:
    """Print the table, the speed-ups, and why a sweep ended."""
    results = bench_figures["results"]
    figures = [name for name in BENCH_METRIC_UNITS if any(result.get(name) for result in results)]
    head = ["", *(["batch × input + output"] if "shape" in results[0] else [])]
    rows = []
    for result in results:
        shape = result.get("shape")
        shape_cell = [f"{shape['batch']} × {shape['input']} + {shape['output']}"] if shape else []
        rows.append(
            [
                result["subject"],
                *shape_cell,
                *[_format_spread(result.get(name)) for name in figures],
            ]
        )
    formats = f"{bench_figures['dtype']}, {bench_figures['quantization']}"
    title = f"{bench_figures['what']}: {bench_figures['engine']} ({formats}) on "
    names = [_column_title(name) for name in figures]
    print_table(
        [*head, *names],
        rows,
        title=f"{title}{bench_figures['device']}; {MEDIAN_MIN_MAX_LABEL} of "
        f"{_num_runs(results)} runs",
    )
    firsts = results[0].get("first_token_ms")
    if bench_figures["what"] == "throughput" and firsts is not None:
        print(f"first token: of the {firsts['runs']} requests of the last run")
    for each in bench_figures.get("speedups", []):
        where = f" at batch {each['shape']['batch']}" if each["shape"] else ""
        print(f"speed-up over {each['over']}{where}: {each['speedup']:.2f}×")
    if bench_figures.get("ended"):
        print(f"the sweep ended before its last batch size: {bench_figures['ended']}")


def _num_runs(results: Sequence[Mapping[str, Any]]) -> int:
    name = next(name for name in ("total_ms", "seconds", "total_s") if name in results[0])
    return results[0][name]["runs"]


def _column_title(figure: str) -> str:
    unit = BENCH_METRIC_UNITS[figure]
    name = figure.removesuffix("_ms").removesuffix("_per_s").removesuffix("_s").replace("_", " ")
    return name if name == unit else f"{name}, {unit}"


def _format_spread(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "–"
    median, low, high = (_format_number(spread[key]) for key in ("median", "min", "max"))
    return f"{median} ({low} … {high})"


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def plot_bench_results(axes: Any, figures: Mapping[str, Any]) -> None:
    """Plot output tokens/s by batch size (latency: a line per subject), else a bar per subject."""
    results = figures["results"]
    subjects = list(dict.fromkeys(result["subject"] for result in results))
    if figures["what"] == "latency":
        key = "output_tokens_per_s" if results[0]["output_tokens_per_s"] else "input_tokens_per_s"
        for subject in subjects:
            own_results = [result for result in results if result["subject"] == subject]
            low = [each[key]["median"] - each[key]["min"] for each in own_results]
            high = [each[key]["max"] - each[key]["median"] for each in own_results]
            at, values = (
                [each["shape"]["batch"] for each in own_results],
                [each[key]["median"] for each in own_results],
            )
            axes.errorbar(at, values, yerr=[low, high], marker="o", capsize=3, label=subject)
        sizes = sorted({result["shape"]["batch"] for result in results})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("batch size")
        axes.set_ylabel(key.replace("_per_s", " per second").replace("_", " "))
        axes.set_ylim(bottom=0)
        axes.legend()
    else:
        key = "output_tokens_per_s" if figures["what"] == "throughput" else "total_s"
        axes.bar(subjects, [result[key]["median"] for result in results])
        axes.set_ylabel(
            "output tokens per second"
            if figures["what"] == "throughput"
            else "seconds to first token"
        )
    axes.grid(alpha=0.3)

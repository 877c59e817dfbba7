"""What ``bench`` measured, as rows, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.cli.output import table

SPREAD = "median (min … max)"

UNITS = {
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


def rows_of(command: str, measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure: its median, with the spread and what was asked beside it."""
    from modelmill.eval.report import row

    rows = []
    about = {key: measured[key] for key in ("engine", "dtype", "quantization", "kernels") if key in measured}
    for result in measured["results"]:
        asked = {key: result[key] for key in ("shape", "requests", "input_tokens", "output_tokens") if key in result}
        for figure, unit in UNITS.items():
            spread = result.get(figure)
            if spread is not None:
                details = {**about, "subject": result["subject"], "spread": spread, **asked}
                name = f"{measured['what']}.{figure}"
                rows.append(row(command, name, spread["median"], unit, measured["device"], **details))
    return rows


def show(measured: Mapping[str, Any]) -> None:
    """The table, the speed-ups, and why a sweep ended."""
    results = measured["results"]
    figures = [name for name in UNITS if any(result.get(name) for result in results)]
    head = ["", *(["batch × input + output"] if "shape" in results[0] else [])]
    rows = []
    for result in results:
        shape = result.get("shape")
        asked = [f"{shape['batch']} × {shape['input']} + {shape['output']}"] if shape else []
        rows.append([result["subject"], *asked, *[_cell(result.get(name)) for name in figures]])
    title = f"{measured['what']}: {measured['engine']} ({measured['dtype']}, {measured['quantization']}) on "
    names = [_heading(name) for name in figures]
    table([*head, *names], rows, title=f"{title}{measured['device']}; {SPREAD} of {_runs(results)} runs")
    firsts = results[0].get("first_token_ms")
    if measured["what"] == "throughput" and firsts is not None:
        print(f"first token: of the {firsts['runs']} requests of the last run")
    for each in measured.get("speedups", []):
        where = f" at batch {each['shape']['batch']}" if each["shape"] else ""
        print(f"speed-up over {each['over']}{where}: {each['speedup']:.2f}×")
    if measured.get("ended"):
        print(f"the sweep ended before its last batch size: {measured['ended']}")


def _runs(results: Sequence[Mapping[str, Any]]) -> int:
    name = next(name for name in ("total_ms", "seconds", "total_s") if name in results[0])
    return results[0][name]["runs"]


def _heading(figure: str) -> str:
    unit = UNITS[figure]
    name = figure.removesuffix("_ms").removesuffix("_per_s").removesuffix("_s").replace("_", " ")
    return name if name == unit else f"{name}, {unit}"


def _cell(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "–"
    return f"{_short(spread['median'])} ({_short(spread['min'])} … {_short(spread['max'])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def draw(axes: Any, measured: Mapping[str, Any]) -> None:
    """latency: output tokens/s by batch size, a line a subject; else a bar a subject."""
    results = measured["results"]
    subjects = list(dict.fromkeys(result["subject"] for result in results))
    if measured["what"] == "latency":
        key = "output_tokens_per_s" if results[0]["output_tokens_per_s"] else "input_tokens_per_s"
        for subject in subjects:
            mine = [result for result in results if result["subject"] == subject]
            low = [each[key]["median"] - each[key]["min"] for each in mine]
            high = [each[key]["max"] - each[key]["median"] for each in mine]
            at, values = [each["shape"]["batch"] for each in mine], [each[key]["median"] for each in mine]
            axes.errorbar(at, values, yerr=[low, high], marker="o", capsize=3, label=subject)
        sizes = sorted({result["shape"]["batch"] for result in results})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("batch size")
        axes.set_ylabel(key.replace("_per_s", " per second").replace("_", " "))
        axes.set_ylim(bottom=0)
        axes.legend()
    else:
        key = "output_tokens_per_s" if measured["what"] == "throughput" else "total_s"
        axes.bar(subjects, [result[key]["median"] for result in results])
        axes.set_ylabel("output tokens per second" if measured["what"] == "throughput" else "seconds to first token")
    axes.grid(alpha=0.3)

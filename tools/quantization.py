"""``python -m tools.quantization``: write docs/quantization.md and plot, or ``--check``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import generated_page
from tools import quantization_speed as speed
from tools import quantization_targets as marks
from tools import quantization_texts as texts
from tools import quantization_trace as trace
from tools.performance.provenance import provenance_line
from tools.performance.rows import read_rows
from tools.performance.runs import can_carry_a_claim

TEMPLATE, PAGE = Path("tools/quantization.template.md"), Path("docs/quantization.md")
PLOT = Path("docs/img/quantization.svg")
RESULTS = Path("benchmarks/results/quantization.jsonl")
NOTE = (
    f"<!-- Made by `make quantization-page` from {TEMPLATE} and {RESULTS.parent}: change those. -->"
)
ALL_TOKENS = 16_384  # tokens of a measurement that the page shows
ROUGE = ("rouge1", "rouge2", "rougeL")
# a checkpoint whose weights were never rounded; all other rows are of the first
SECOND_CHECKPOINT = "stories260K"
UNTRACED = "†"
"""Behind the name of a build whose row cannot be traced to a commit."""
LEAST_EXCESS = 0.01  # per cent; what is less is drawn there
Row = Mapping[str, Any]


def select_rows(file: Path, second: bool = False) -> list[Row]:
    """Return the newest row of each measurement on all tokens by excess; refused builds last.

    second: those of the second checkpoint instead, the least KL first.
    """
    rows = read_rows(file)
    newest = {row["key"]: row for row in rows if row["tokens"] == ALL_TOKENS}
    newest = {
        key: row
        for key, row in newest.items()
        if (row.get("checkpoint") == SECOND_CHECKPOINT) == second
    }
    if second:
        return sorted(
            newest.values(), key=lambda row: (row.get("group", 0), row.get("mean_kl", float("inf")))
        )
    return sorted(
        newest.values(), key=lambda row: (row.get("excess", float("inf")), row["options"])
    )


def row_name(row: Row) -> str:
    """What was built and how it was run."""
    kv_dtype = row.get("kv_cache_dtype", "auto")
    input_note = ", inputs as they are" if row.get("whole_inputs") else ""
    return (
        f"`{row['options'] or '-q none'}`"
        + ("" if kv_dtype == "auto" else f", KV {kv_dtype}")
        + input_note
        + ("" if can_carry_a_claim(row) else f" {UNTRACED}")
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| build | perplexity | over float32 | mean KL | same next token | ROUGE-1 / 2 / L | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "perplexity" not in row:
            lines.append(f"| {row_name(row)} | refused by the acceptance contract | | | | | |")
            continue
        rouge = [f"{row['rouge'][metric]:.1f}" for metric in ROUGE] if "rouge" in row else []
        cells = (
            row_name(row), f"{row['perplexity']:.4f}",
            f"{round(100 * row['excess'], 2) + 0.0:+.2f} %",
            f"{row['mean_kl']:.4f}", f"{100 * row['agreement']:.1f} %", " / ".join(rouge),
            f"{row['bytes'] / 2**20:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render(
    template: str,
    rows: Sequence[Row],
    steps: Sequence[Row] = (),
    second: Sequence[Row] = (),
    served: Sequence[Row] = (),
    judged: Sequence[Row] = (),
) -> str:
    """Return the page's text.

    steps: rows of whole steps on a GPU; second: of the second checkpoint; served: of a trace;
    judged: of held-back texts.
    """
    parts = {
        "table": "\n".join([*table(rows), *_traced_provenance(rows)]),
        "texts": "\n".join([*texts.table(judged), *_provenance(judged)]),
        "text sources": "\n".join(texts.sources(judged)),
        "marks": "\n".join(marks.targets_table(rows, texts.mean_and_worst(judged))),
        "second table": "\n".join([*table(second), *_traced_provenance(second)]),
        "plot": f"![Size on disk and what it costs]({PLOT.relative_to('docs')})",
        "speed": "\n".join([*speed.table(steps), *_provenance(speed.shown(steps))]),
        "speed plot": f"![Speed and what it costs]({speed.PLOT.relative_to('docs')})",
        "trace": "\n".join([*trace.table(served), *_provenance(served)]),
    }
    text = template
    for mark, part in parts.items():
        text = text.replace(f"{{{{ {mark} }}}}", part)
    return f"{NOTE}\n\n{text.strip()}\n"


def _provenance(rows: Sequence[Row]) -> list[str]:
    """A line of device, versions, dates and commits; the page names the commands."""
    return ["", provenance_line(rows, commands=False)] if rows else []


def _traced_provenance(rows: Sequence[Row]) -> list[str]:
    """The same of the rows that name their commit, and a line of those that do not."""
    traced = [row for row in rows if can_carry_a_claim(row)]
    dates = sorted({row["date"][:10] for row in rows if not can_carry_a_claim(row)})
    note = f"{UNTRACED} of {', '.join(dates)}: the row names no commit, to be measured again."
    return _provenance(traced) + (["", note] if dates else [])


def draw_plot(rows: Sequence[Row], file: Path) -> None:
    """Excess of perplexity, a line a build, with its size beside the point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "modelmill"
    built = [row for row in rows if "perplexity" in row]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.24 * len(built)))
    for line, row in enumerate(built):
        at = (max(100 * row["excess"], LEAST_EXCESS), line)
        axes.plot(*at, "o", color="#1f77b4")
        size = f"{row['bytes'] / 2**20:.0f} MiB"
        axes.annotate(size, at, xytext=(7, -3), textcoords="offset points", fontsize=8)
    labels = [row_name(row).replace("`", "").removesuffix(f" {UNTRACED}") for row in built]
    axes.set_yticks(range(len(built)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel(f"perplexity over float32, % (the left edge: {LEAST_EXCESS} or less)")
    axes.set_title("What it costs, and size on disk (SmolLM2-135M)")
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def stale(root: Path) -> list[Path]:
    """The page where it is not what template and rows give."""
    fresh = (root / PAGE).exists() and (root / PAGE).read_text("utf-8") == render_page(root)
    return [] if fresh else [PAGE]


def render_page(root: Path) -> str:
    """The page as template and rows give it."""
    results, steps = root / RESULTS, speed.step_rows(root / speed.RESULTS)
    served = trace.newest(trace.core_rows(root / speed.RESULTS))
    return render(
        (root / TEMPLATE).read_text("utf-8"),
        select_rows(results),
        steps,
        select_rows(results, second=True),
        served,
        texts.newest(root / texts.RESULTS),
    )


def write(root: Path) -> list[Path]:
    """The page and its plots from template and rows; the page's path."""
    rows, steps = select_rows(root / RESULTS), speed.step_rows(root / speed.RESULTS)
    (root / PAGE).write_text(render_page(root), "utf-8")
    draw_plot(rows, root / PLOT)
    speed.draw_plot(steps, rows, root / speed.PLOT)
    return [PAGE]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or with --check 1 where the page is stale."""
    return generated_page.run(argv, __doc__, "quantization-page", stale, write)


if __name__ == "__main__":
    sys.exit(main())

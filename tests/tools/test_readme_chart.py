"""The README's chart is what the rows give, and only pairs of one run count."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools import readme_chart
from tools.generated_page import stale_pages

ROOT = Path(__file__).resolve().parents[2]


def _row(subject: str, value: float, run: str = "a", **more: Any) -> dict[str, Any]:
    facts = {"work": "decode-1x128", "device": "NVIDIA H200", "commit": "c", "unit": "ms/token"}
    return {**facts, "subject": subject, "value": value, "run": run, **more}


def test_the_chart_of_the_repository_is_fresh() -> None:
    assert not stale_pages(ROOT, readme_chart.chart(ROOT)), (
        "run `make performance` and commit what it writes"
    )


def test_the_median_is_over_runs_with_both_sides() -> None:
    rows = [_row("modelmill", 2, "a"), _row("vLLM", 3, "a"), _row("modelmill", 4, "b")]
    rows += [_row("vLLM", 5, "b"), _row("modelmill", 1, "c"), _row("vLLM", 9, "d")]
    (pair,) = readme_chart.read_pairs(rows)
    assert pair.values == {"modelmill": 3, "vLLM": 4}
    assert pair.ratios == (1.25, 1.5)
    assert pair.ratio == 1.375


def test_rows_of_another_device_or_without_a_commit_do_not_count() -> None:
    rows = [_row("modelmill", 2), _row("vLLM", 3, device="NVIDIA H100")]
    assert not readme_chart.read_pairs(rows)
    without = {key: value for key, value in _row("vLLM", 3).items() if key != "commit"}
    assert not readme_chart.read_pairs([rows[0], without])


def test_a_trace_counts_in_the_order_of_arrival_only() -> None:
    trace = {"work": "trace-500", "unit": "s"}
    engine, peer = _row("modelmill", 2, **trace), _row("vLLM", 3, **trace)
    assert not readme_chart.read_pairs([engine, peer])
    assert readme_chart.read_pairs([{**engine, "order": "arrival"}, {**peer, "order": "arrival"}])


def test_the_drawing_is_valid_svg_with_both_times() -> None:
    pairs = readme_chart.read_pairs([_row("modelmill", 2), _row("vLLM", 3)])
    texts = [each.text for each in ElementTree.fromstring(readme_chart.draw(pairs)).iter()]
    assert "2 ms  (1.50× as fast)" in texts
    assert "3 ms" in texts

"""The README's chart is what the rows give, and only pairs with commit and card count."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools import readme_chart
from tools.generated_page import stale_pages
from tools.performance.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]


def _row(subject: str, value: float, card: str = "a", **more: Any) -> dict[str, Any]:
    facts = {"work": "decode-1x128", "device": "NVIDIA H200", "commit": "c", "unit": "ms/token"}
    facts |= {"bench": "table", "part": "marks", "date": "2026-11-01", "device_id": card}
    return {**facts, "subject": subject, "value": value, "run": f"run on {card}", **more}


def _pair(engine: float, peer: float, card: str = "a", **more: Any) -> list[dict[str, Any]]:
    return [_row("modelmill", engine, card, **more), _row("vLLM", peer, card, **more)]


def test_the_chart_of_the_repository_is_fresh() -> None:
    assert not stale_pages(ROOT, readme_chart.chart(ROOT)), (
        "run `make performance` and commit what it writes"
    )


def test_the_readme_says_what_the_chart_says() -> None:
    summaries = readme_chart.chart_summaries(read_rows(ROOT / readme_chart.RESULTS))
    assert set(summaries) == set(readme_chart.WORKS)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert readme_chart.caption(summaries) in readme


def test_the_median_is_over_cards_with_both_sides() -> None:
    rows = [*_pair(2, 3, "a"), *_pair(4, 5, "b"), _row("modelmill", 1, "c"), _row("vLLM", 9, "d")]
    (summary,) = readme_chart.chart_summaries(rows).values()
    assert (summary.engine_value, summary.peer_value, summary.ratio) == (3, 4, 1.375)
    assert readme_chart.caption({"decode-1x128": summary}) == (
        "geometric mean 1.38× as fast, the least favourable run 1.25×; "
        "times and ratios are medians over 2 cards"
    )


def test_works_of_different_numbers_of_cards_say_so() -> None:
    trace = {"work": "trace-500", "unit": "s", "part": "trace", "order": "arrival"}
    rows = [*_pair(2, 3, "a"), *_pair(4, 5, "b"), *_pair(2, 3, "c", **trace)]
    assert readme_chart.caption(readme_chart.chart_summaries(rows)).endswith("over 1 to 2 cards")


@pytest.mark.parametrize("missing", ["commit", "device_id"])
def test_rows_without_commit_or_card_do_not_count(missing: str) -> None:
    rows = [{key: value for key, value in row.items() if key != missing} for row in _pair(2, 3)]
    assert readme_chart.chart_summaries(_pair(2, 3))
    assert not readme_chart.chart_summaries(rows)


def test_rows_of_another_device_do_not_count() -> None:
    assert not readme_chart.chart_summaries(_pair(2, 3, device="NVIDIA H100"))


def test_a_trace_counts_in_the_order_of_arrival_only() -> None:
    trace = {"work": "trace-500", "unit": "s", "part": "trace"}
    assert not readme_chart.chart_summaries(_pair(2, 3, **trace))
    assert not readme_chart.chart_summaries(_pair(2, 3, **trace, order="longest-first"))
    assert readme_chart.chart_summaries(_pair(2, 3, **trace, order="arrival"))


def test_the_drawing_is_valid_svg_with_both_times() -> None:
    drawing = readme_chart.draw(readme_chart.chart_summaries(_pair(2, 3)))
    texts = [each.text for each in ElementTree.fromstring(drawing).iter()]
    assert "2 ms  (1.50× as fast)" in texts
    assert "3 ms" in texts

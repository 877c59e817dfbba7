"""docs/performance.md: it is what the rows and the template give, and the rows are read rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.performance import numbers, page, plots
from tools.performance.__main__ import main
from tools.performance.rows import read_rows, rows_by_state

ROOT = Path(__file__).resolve().parent.parent.parent


def table(subject: str, value: float, run: str, date: str) -> dict[str, Any]:
    """A row of ``benchmarks/table.py``."""
    version = {"vllm": "0.25.1"} if subject == "vLLM" else {"modelmill": "0.1.0"}
    return {
        "bench": "table", "part": "marks", "work": "decode-1x128", "subject": subject, "run": run,
        "value": value, "date": date, "command": "python table", "device": "NVIDIA H200",
        "device_id": "GPU-1", "commit": "abc1234", "versions": version,
    }  # fmt: skip


def test_the_committed_page_is_what_the_rows_and_the_template_give() -> None:
    assert page.stale_files(ROOT) == [], "run `make performance` and commit what it writes"


def test_rows_are_read_in_order_and_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_rows(file) == [{"a": 1}, {"a": 2}]
    assert read_rows(tmp_path / "none.jsonl") == []
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_rows(file)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.6239, "0.624"), (3.712, "3.71"), (12.46, "12.5"), (102.3, "102"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert numbers.number(value) == text


def test_states_are_compared_within_a_run_and_a_work() -> None:
    step = {"figure": "step.decode_ms", "batch": 1, "context": 128, "unit": "ms"}
    rows = [
        {**step, "state": "before", "run": "one", "value": 4.0},
        {**step, "state": "after", "run": "one", "value": 3.0},
        {**step, "state": "alone", "run": "two", "value": 3.5}, {**step, "value": 9.0},
    ]  # fmt: skip
    assert list(rows_by_state(rows)) == [("one", "decode, batch 1, context 128")]
    groups = plots.code_states(rows)
    assert [label for label, _ in groups] == [
        "decode, batch 1, context 128",
        "before: 4 ms",
        "after: 3 ms",
    ]
    assert groups[2][1] == {"over the first": 0.75}


def test_an_unknown_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nothing is known of \{\{ table sped"):
        page.render("{{ table sped }}", {"h200": [], page.SUITE: []})


def test_the_template_keeps_its_text() -> None:
    rendered = page.render(
        "# A\n\nBraces {{ inside }} a line stay.\n\n{{ plot speed }}\n",
        {"h200": [], page.SUITE: []},
    )
    assert rendered == (
        f"{page.made_from(page.TEMPLATE)}\n\n# A\n\nBraces {{{{ inside }}}} a line stay.\n\n"
        "![Beside vLLM on an H200](img/performance-speed.svg)\n"
    )


def test_a_figure_just_above_its_target_does_not_look_like_it() -> None:
    assert numbers.against_target(29.0152, 29.0) == "29.02"
    assert numbers.against_target(28.94, 29.0) == "28.9"
    assert numbers.against_target(29.0, None) == "29.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with templates, a note and two rows."""
    for path, text in (
        (page.TEMPLATE, "# P\n\n{{ table vllm }}\n\n{{ plot speed }}\n"),
        (page.PAGES[Path("docs/bench.md")], "# B\n\n{{ table suite }}\n"),
        (Path("docs/notes/an-idea.md"), "# An idea\n\n*decode · helped*\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / page.RESULTS).mkdir(parents=True)
    rows = [table("modelmill", 3.7, "b", "06"), table("vLLM", 4.84, "b", "06")]
    (tmp_path / page.RESULTS / "h200.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return tmp_path


def test_a_page_is_written_once_and_stale_after_a_new_row(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = root / page.plot_path("speed")
    assert main(["--root", str(root)]) == 0
    first = plot.read_bytes()
    assert main(["--root", str(root), "--check"]) == 0
    plot.unlink()
    assert main(["--root", str(root)]) == 0
    assert plot.read_bytes() == first, "the same data gives the same bytes"
    with (root / page.RESULTS / "h200.jsonl").open("a") as sink:
        for row in (table("modelmill", 3.2, "c", "07"), table("vLLM", 4.8, "c", "07")):
            sink.write(json.dumps(row) + "\n")
    assert main(["--root", str(root), "--check"]) == 1
    assert "docs/performance.md is stale; run `make performance`" in capsys.readouterr().err
    assert page.stale_files(root) == ["docs/performance.md", "docs/img/performance-speed.svg"]


def test_an_age_is_no_reason_to_be_stale_and_is_written_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write(root)
    monkeypatch.setattr(page.vllm_tables, "provenance_line", lambda _rows: "`abc1234 (age 7)`")
    text = (root / page.PAGE).read_text()
    lines = [line for line in text.splitlines() if "abc1234" in line]
    (root / page.PAGE).write_text(text.replace(lines[0], "`abc1234 (age 6)`"))
    assert page.stale_files(root) == []
    assert page.write(root) == [str(page.PAGE)]
    assert "`abc1234 (age 7)`" in (root / page.PAGE).read_text()


@pytest.mark.parametrize("device", ["h200", "cpu", page.SUITE])
def test_every_row_says_how_where_with_what_and_when_it_was_measured(device: str) -> None:
    rows = page.read_device_rows(ROOT)[device]
    assert rows or device == page.SUITE
    for number, row in enumerate(rows, 1):
        missing = {"command", "device", "date"} - set(row)
        assert not missing, f"{device}.jsonl, line {number}: no {', '.join(sorted(missing))}"
        assert "versions" in row or "torch" in row, f"{device}.jsonl, line {number}: no versions"
        assert "layers" not in row, f"{device}.jsonl, line {number}: a rehearsal is no evidence"

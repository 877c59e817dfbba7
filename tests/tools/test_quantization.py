"""The page on quantization is what its template and the rows give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools import quantization

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = {
    "key": "a", "options": "-q int8", "tokens": 16384, "perplexity": 20.5, "excess": 0.0125,
    "mean_kl": 0.25,
    "agreement": 0.75, "bytes": 3 << 20, "kv_cache_dtype": "int8",
    "device": "AMD EPYC", "date": "2026-01-02T03", "command": "python benchmarks/quantization.py",
    "commit": "0123456789ab", "host_cpu": "AMD EPYC",
}  # fmt: skip


def test_the_page_of_the_repository_is_fresh() -> None:
    assert not quantization.stale(ROOT), "run `make quantization-page` and commit what it writes"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("docs/img", "benchmarks/results", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / quantization.TEMPLATE, tmp_path / quantization.TEMPLATE)
    return tmp_path


def lay(root: Path, *rows: dict[str, object]) -> None:
    (root / quantization.RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_written_once_and_stale_after_a_new_row(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    lay(root, GOOD)
    assert quantization.main(["--root", str(root), "--check"]) == 1
    assert "make quantization-page" in capsys.readouterr().err
    assert quantization.main(["--root", str(root)]) == 0
    assert quantization.main(["--root", str(root), "--check"]) == 0
    assert (root / quantization.PLOT).stat().st_size > 1000
    page = (root / quantization.PAGE).read_text()
    assert "| `-q int8`, KV int8 | 20.5000 | +1.25 % | 0.2500 | 75.0 % |  | 3.0 |" in page
    lay(root, GOOD, {**GOOD, "key": "b", "options": "-q fp8"})
    assert quantization.stale(root)


def test_the_newest_row_counts_and_the_best_stands_first(root: Path) -> None:
    other = {**GOOD, "key": "b", "options": "-q int4", "excess": 0.5}
    refused = {
        "key": "c", "options": "-q fp8", "tokens": 16384, "accepted": False,
        **{name: GOOD[name] for name in ("device", "date", "command")},
    }  # fmt: skip
    lay(root, refused, other, {**GOOD, "excess": 0.9}, GOOD, {**GOOD, "key": "d", "tokens": 512})
    rows = quantization.select_rows(root / quantization.RESULTS)
    assert [row["key"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["excess"] == 0.0125
    assert "refused" in quantization.table(rows)[-1]


def test_the_second_checkpoint_has_a_table_of_its_own(root: Path) -> None:
    less = {
        **GOOD,
        "key": "e",
        "checkpoint": quantization.SECOND_CHECKPOINT,
        "options": "-q int4",
        "group": 32,
    }
    more = {
        **less,
        "key": "f",
        "options": "-q int4 --method nearest",
        "mean_kl": 0.5,
        "excess": -0.5,
    }
    lay(root, more, GOOD, less)
    assert [row["key"] for row in quantization.select_rows(root / quantization.RESULTS)] == ["a"]
    assert [
        row["key"] for row in quantization.select_rows(root / quantization.RESULTS, second=True)
    ] == ["e", "f"]
    page = quantization.render_page(root)
    first, _, second = page.partition("never rounded")
    assert "`-q int8`, KV int8" in first
    assert "`-q int4 --method nearest`" in second
    assert "`-q int4 --method nearest`" not in first


def test_rouge_stands_beside_it_where_it_was_measured() -> None:
    rouge = {"rouge1": 31.26, "rouge2": 10.0, "rougeL": 21.5, "rougeLsum": 28.0}
    assert (
        "| 75.0 % | 31.3 / 10.0 / 21.5 | 3.0 |"
        in quantization.table([{**GOOD, "rouge": rouge}])[-1]
    )


def test_a_row_without_a_commit_is_marked() -> None:
    page = quantization.render("{{ table }}", [GOOD, {**GOOD, "options": "-q fp8", "commit": None}])
    assert "| `-q int8`, KV int8 | 20.5" in page
    assert "| `-q fp8`, KV int8 † | 20.5" in page
    assert "† of 2026-01-02: the row names no commit" in page
    assert "†" not in quantization.render("{{ table }}", [GOOD])

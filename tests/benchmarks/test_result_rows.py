"""Rows that stand already: those of this very measurement, the old ones with them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quantization as bench
from benchmarks import result_rows
from benchmarks.result_rows import matching_rows, row_key, without_threads

BUILD = ["-q", "int4", "--method", "gptq"]
ROWS = bench.read_rows(bench.RESULTS)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with the texts that the kept rows name; the device is a CPU."""
    texts, here = tmp_path / "shared/data/text", tmp_path / "repository"
    texts.mkdir(parents=True)
    here.mkdir()
    for name in (
        "wikitext2_test_a.txt",
        "cnndm_calibration.jsonl",
        "cnndm_eval.jsonl",
        "other.jsonl",
    ):
        (texts / name).write_text(f'{{"text": "{name}"}}\n' * 120)
    monkeypatch.chdir(here)
    monkeypatch.setattr(
        result_rows,
        "requested_device",
        lambda options: {"cuda": "NVIDIA H200"}.get(options.device, "A CPU"),
    )
    return here


def parse_options(*more: str) -> argparse.Namespace:
    return bench.parse_args(
        ["model.gguf", "--text", "../shared/data/text/wikitext2_test_a.txt", *more]
    )[0]


def use_files_of_row(
    row: dict[str, Any], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the files that a row's measurement read the digests that it names, if it does."""
    if "text_sha256" not in row:
        return
    articles, texts = row.get("articles", {"sha256": "", "items": 1}), repository.parent
    calibration = row["calibration"] or {"name": "", "sha256": ""}
    digests = {
        row["text"]: row["text_sha256"],
        "cnndm_eval.jsonl": articles["sha256"],
        calibration["name"]: calibration["sha256"],
    }
    (texts / "shared/data/text/cnndm_eval.jsonl").write_text("{}\n" * articles["items"])
    digests_of_files = result_rows.option_file_digests

    def read(words: Sequence[str]) -> list[str]:
        names = [Path(word).name for word in words]
        return [digests[name] for name in names if digests.get(name)] or digests_of_files(words)

    monkeypatch.setattr(result_rows, "option_file_digests", read)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['options']} {row['date']}" for row in ROWS])
def test_every_kept_row_is_found_by_its_command(
    row: dict[str, Any], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        result_rows, "requested_device", lambda options: without_threads(row["device"])
    )
    use_files_of_row(row, repository, monkeypatch)
    options, _ = bench.parse_args(shlex.split(row["command"])[2:])
    key, stands = matching_rows(ROWS, options, shlex.split(row["options"]))
    assert row in stands
    newest = [each for each in ROWS if each["key"] == row["key"]][-1]
    assert (key == row["key"]) == (newest in stands), (
        "measured again, it stands for what a report shows"
    )


OTHERS: list[tuple[str, ...]] = [
    ("--device", "cuda"),
    ("--calibration", "../shared/data/text/other.jsonl"),
    ("--kv-cache-dtype", "int8"),
    ("--window", "512"),
    ("--whole-inputs",),
]


@pytest.mark.parametrize("more", OTHERS, ids=" ".join)
def test_another_device_or_calibration_is_another_measurement(
    more: tuple[str, ...], repository: Path
) -> None:
    assert row_key(parse_options(), BUILD) == row_key(parse_options(), BUILD)
    assert row_key(parse_options(), BUILD) != row_key(parse_options(*more), BUILD)
    calibration = {"name": "cnndm_calibration.jsonl", "samples": 1, "length": 1}
    older = {
        "key": result_rows.option_names(parse_options(), BUILD),
        "calibration": calibration,
        "device": "A CPU, 2 threads",
    }
    assert matching_rows([older], parse_options(), BUILD) == (older["key"], [older])
    assert matching_rows([older], parse_options(*more), BUILD) == (
        row_key(parse_options(*more), BUILD),
        [],
    )


@pytest.mark.parametrize("file", ["wikitext2_test_a.txt", "cnndm_calibration.jsonl"])
@pytest.mark.parametrize("change", ["rewritten", "gone"])
def test_other_files_under_the_same_names_are_another_measurement(
    file: str, change: str, repository: Path
) -> None:
    path, digests = repository.parent / "shared/data/text" / file, result_rows.option_file_digests
    text, calibration = (
        digests([str(path.with_name(each))])[0]
        for each in ("wikitext2_test_a.txt", "cnndm_calibration.jsonl")
    )
    read = {"name": "cnndm_calibration.jsonl", "sha256": calibration}
    facts = {"calibration": read, "text_sha256": text, "device": "A CPU"}
    names = result_rows.option_names(parse_options(), BUILD)
    rows = [
        {"key": names, **facts},
        {"key": row_key(parse_options(), BUILD), "names": names, **facts},
    ]
    for row in rows:
        assert matching_rows([row], parse_options(), BUILD) == (row["key"], [row])
    path.write_text("other") if change == "rewritten" else path.unlink()
    assert matching_rows(rows, parse_options(), BUILD)[1] == []


@pytest.mark.parametrize(("accepted", "stands"), [(True, True), (False, False)])
def test_a_recipe_without_statistics_is_the_same_with_any_calibration(
    accepted: bool, stands: bool, repository: Path
) -> None:
    row = {
        "key": row_key(parse_options(), BUILD),
        "names": result_rows.option_names(parse_options(), BUILD),
        "accepted": accepted,
    }
    row |= {"calibration": None, "device": "A CPU"}
    other = parse_options("--calibration", "../shared/data/text/other.jsonl")
    assert matching_rows([row], other, BUILD) == (
        (row["key"], [row]) if stands else (row_key(other, BUILD), [])
    )
    assert matching_rows([row], parse_options("--device", "cuda"), BUILD)[1] == []


def test_summaries_that_are_wanted_must_be_there(repository: Path) -> None:
    summary_args = ("--summaries", "../shared/data/text/cnndm_eval.jsonl")
    key = row_key(parse_options(), BUILD)
    without = {"key": key, "accepted": True, "device": "A CPU"}
    row = without | {"summaries": 100}
    digest = result_rows.rouge_articles(parse_options(*summary_args))
    assert matching_rows([without], parse_options(*summary_args), BUILD) == (key, []), (
        "measured with them, it has one line in a report"
    )
    assert matching_rows([row], parse_options(*summary_args), BUILD)[1] == [row]
    assert matching_rows([row], parse_options(), BUILD)[1] == [row]
    assert matching_rows([row], parse_options(*summary_args, "--num", "110"), BUILD)[1] == []
    assert matching_rows([row | {"articles": digest}], parse_options(*summary_args), BUILD)[1] != []
    other = ("--summaries", "../shared/data/text/other.jsonl")
    assert matching_rows([row | {"articles": digest}], parse_options(*other), BUILD)[1] == []
    refused = {"key": key, "accepted": False, "device": "A CPU"}
    assert matching_rows([refused], parse_options(*summary_args), BUILD)[1] == [refused]
    assert matching_rows([without], parse_options(*summary_args, "--whole-inputs"), BUILD)[1] == []


def test_a_report_tells_two_measurements_of_one_build_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = next(row for row in ROWS if row["options"] == "-q rptq --bits w8a8")
    bench.report([row])
    assert row["device"] not in capsys.readouterr().out
    bench.report([row, row | {"key": "other", "device": "NVIDIA H200"}])
    output = capsys.readouterr().out
    assert "NVIDIA H200" in output
    assert without_threads(row["device"]) in output

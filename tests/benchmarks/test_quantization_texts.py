"""The script that judges recipes on several texts: its options and what it reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import quantization_texts as bench


def test_sources_are_named_by_kind_file_and_what_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text")
    assert bench.parse_source(f"news={file}") == bench.TextSource("news", file)
    assert bench.parse_source(f"news={file}@512") == bench.TextSource("news", file, 512)
    for wrong in (str(file), f"={file}", "news=", f"news={file}@x", f"news={tmp_path}/b.txt"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench.parse_source(wrong)


def test_a_jsonl_file_is_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines: list[Any] = [{"article": "one"}, {"turns": ["two", "three"]}, {"text": "four"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench.read_source(file) == "one\n\ntwo\nthree\n\nfour"
    file.write_text('{"other": 1}\n')
    with pytest.raises(SystemExit, match="line 1: has none of article, turns, text"):
        bench.read_source(file)


def test_whole_windows_behind_what_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 30)
    monkeypatch.setattr(
        bench.quantization, "encode_text", lambda _core, text, count: list(range(len(text)))[:count]
    )
    core = SimpleNamespace()
    windows = bench.read_windows(core, bench.TextSource("a", file, 5), 3, 10)
    assert windows == [list(range(5, 15)), list(range(15, 25))]
    with pytest.raises(SystemExit, match="no window of 10 tokens behind 25"):
        bench.read_windows(core, bench.TextSource("a", file, 25), 3, 10)


def test_the_baseline_is_kept_by_its_windows(tmp_path: Path) -> None:
    known = bench.BaselineFile(tmp_path / "base.json")
    assert known.get([[1, 2]]) is None
    known.put([[1, 2]], 20.5)
    known.put([[3]], 7.0)
    assert (known.get([[1, 2]]), known.get([[3]]), known.get([[1], [2]])) == (20.5, 7.0, None)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("news=/a/b/news.jsonl@16", "news=news.jsonl@16"),
        ("../shared/calibration.jsonl", "calibration.jsonl"),
        ("out/model.gguf", "out/model.gguf"),
        ("--windows=4", "--windows=4"),
    ],
)
def test_a_command_names_no_folder_of_this_machine(word: str, expected: str) -> None:
    assert bench.portable(word) == expected

"""A row is one line that tells its facts, its command without this machine's folders, and when it
was made.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.append_rows import append_rows, portable_command


def test_rows_stand_behind_those_of_before(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = [
        {"figure": "a", "value": 1.5, "facts": {"device": "x", "value": 2}},
        {"figure": "ü", "facts": {}},
    ]
    append_rows(out, rows[:1], "one")
    append_rows(out, rows[1:], "two")
    first, second = map(json.loads, out.read_text("utf-8").splitlines())
    assert first.pop("date").endswith("Z")
    assert {"commit", "host_cpu", "load_1m"} <= first.keys()
    first = {name: first[name] for name in ("figure", "value", "device", "command")}
    assert first == {"figure": "a", "value": 2, "device": "x", "command": "one"}
    assert second["figure"] == "ü"
    assert "ü" in out.read_text("utf-8")
    assert rows[0]["facts"], "rows stay as they were"


def test_a_command_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    command = portable_command(
        "sam", ["--out", str(tmp_path / "a b.jsonl"), "--works", "click,everything", "benchmarks/x"]
    )
    assert (
        command
        == "python benchmarks/sam.py --out 'a b.jsonl' --works click,everything benchmarks/x"
    )

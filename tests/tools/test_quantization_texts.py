"""The table of held-back texts: what stands in a line, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools import quantization_texts as texts


def row(options: str, kind: str, excess: float, **more: Any) -> dict[str, Any]:
    return {
        "options": options, "kind": kind, "excess": excess, "text": f"{kind}.txt", "skip": 0,
        "text_sha256": "0123456789abcdef", "tokens": 4096, "float32": 20.5,
        "device": "Some CPU, 1 threads", "commit": "abc1234", "host_cpu": "Some CPU", **more,
    }  # fmt: skip


ROWS = [
    row("-q rptq", "news", 0.01), row("-q rptq", "code", 0.02),
    row("-q int8", "news", 0.001), row("-q int8", "code", 0.003),
]  # fmt: skip


def test_mean_and_worst_stand_behind_the_texts_and_the_least_worst_first() -> None:
    head, _, *lines = texts.table(ROWS)
    assert head == "| build | news | code | mean | worst |"
    assert lines == [
        "| `-q int8` | +0.10 % | +0.30 % | +0.20 % | **+0.30 %** |",
        "| `-q rptq` | +1.00 % | +2.00 % | +1.50 % | **+2.00 %** |",
    ]


def test_only_texts_that_every_build_was_judged_on_count() -> None:
    _, _, int8, rptq = texts.table([*ROWS, row("-q rptq", "verse", 0.5)])
    assert rptq == "| `-q rptq` | +1.00 % | +2.00 % | +50.00 % | +1.50 % | **+2.00 %** |"
    assert int8.endswith("| +0.30 % |  | +0.20 % | **+0.30 %** |")


def test_the_newest_row_of_a_build_and_text_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    older = row("-q rptq", "news", 0.5)
    noted = row("-q rptq", "news", 0.4, note="clips")
    refused = [row("-q rptq", "news", 0.3, commit=each) for each in (None, "abc1234-dirty")]
    rows = (older, noted, *ROWS, *refused)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert [each["excess"] for each in texts.newest(file)] == [0.01, 0.4, 0.02, 0.001, 0.003]
    assert any("`-q rptq` (clips)" in line for line in texts.table(texts.newest(file)))


def test_sources_name_what_was_left_out() -> None:
    lines = texts.sources([row("-q rptq", "news", 0.01, skip=131072), *ROWS])
    assert lines[2] == "| news | `news.txt` | 4,096 | 20.500 | `0123456789ab` |"
    assert len(lines) == 4
    assert "behind the first 131,072 tokens" in texts.sources([row("", "a", 0, skip=131072)])[2]

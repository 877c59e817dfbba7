"""``bench serve`` keeps what it measured, whatever comes after, and no key."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import bench
from modelmill.eval import openai_client, serving_load
from modelmill.eval.openai_client import RequestTiming

KEYS = [
    ["--api-key", "SECRET123"],
    ["--api_key", "SECRET123"],
    ["--api-key=SECRET123"],
    ["--api_key=SECRET123"],
]


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load sees the same: nothing is asked."""

    async def run(*_: Any) -> tuple[list[RequestTiming], float]:
        good = [RequestTiming(0.0, [0.1, 0.2 + 0.1 * place], 5, 2) for place in range(4)]
        return [*good, RequestTiming(0.0, error="gone")], 2.0

    async def first_text_model_id(self: Any) -> str:
        return "m"

    monkeypatch.setattr(serving_load, "run_serving_load", run)
    monkeypatch.setattr(openai_client.OpenAIClient, "first_text_model_id", first_text_model_id)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_plot_that_cannot_be_drawn_loses_nothing(
    cli: Any, fake_server: None, tmp_path: Path
) -> None:
    saved_rows = tmp_path / "serve.jsonl"
    code, out, err = cli(
        "bench",
        "serve",
        "--url",
        "http://h:1",
        "--plot",
        saved_rows / "x.png",
        "--save",
        saved_rows,
    )
    assert code == 2
    assert "cannot write the plot" in err
    assert "first token" in out
    assert {row["figure"] for row in rows(saved_rows)} >= {
        "serve.first_token_ms",
        "serve.requests_per_s",
    }


def test_what_is_drawn(cli: Any, fake_server: None, tmp_path: Path) -> None:
    assert cli("bench", "serve", "--url", "http://h:1", "--plot", tmp_path / "x.png")[0] == 1
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", KEYS, ids=[" ".join(key) for key in KEYS])
def test_rows_and_no_key(
    cli: Any, fake_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: list[str]
) -> None:
    saved_rows = tmp_path / "serve.jsonl"
    words = [
        "bench",
        "serve",
        "--url",
        "http://h:1",
        *key,
        "--save",
        str(saved_rows),
        "--first-ms",
        "150",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["modelmill", *words])
    code, output, _ = cli(*words)
    assert code == 1, "one of the requests failed"
    assert "SECRET123" not in saved_rows.read_text() + json.dumps(output)
    rows_by_figure = {row["figure"]: row for row in rows(saved_rows)}
    assert output["rows"] == list(rows_by_figure.values())
    for row in rows_by_figure.values():
        assert {"command", "device", "versions", "date", "figure", "value", "unit"} <= set(row)
        assert (row["device"], row["model"], row["requests"], row["failed"]) == (
            "http://h:1",
            "m",
            5,
            1,
        )
        assert "***" in row["command"]
    assert rows_by_figure["serve.first_token_ms"]["value"] == pytest.approx(100)
    assert rows_by_figure["serve.whole_ms"]["unit"] == "ms"
    assert rows_by_figure["serve.whole_ms"]["spread"]["median"] == pytest.approx(350)
    assert (
        rows_by_figure["serve.good_requests_per_s"]["value"],
        rows_by_figure["serve.good_requests_per_s"]["unit"],
    ) == (
        2.0,
        "requests/s",
    )


def test_other_words_stay() -> None:
    assert (
        bench._redacted_command(["bench", "latency", "api-key", "x y"])
        == "modelmill bench latency api-key 'x y'"
    )


def test_help_tells_what_serve_reads() -> None:
    """A flag that serve reads does not look like another measurement's."""
    helps = {
        each.name: each.metadata["help"] for each in fields(bench.Args) if "help" in each.metadata
    }
    for name in ("num_prompts", "trace"):
        assert "serve" in helps[name].partition(":")[0]
    assert "serve" not in helps["dataset"]

"""``build -q int4`` from the command line: what it shows, and that an engine is not evaluated on
what it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.artifact.store import open_artifact

Cli = Callable[..., tuple[int, Any, str]]
TEXT = "Once upon a time there was a little mill. The miller had a cat and the cat had a hat. "


@pytest.fixture
def calibration_data(tmp_path: Path) -> Path:
    path = tmp_path / "seen.jsonl"
    lines = [
        {"article": f"{TEXT} They saw {n} birds and {n} boats.", "highlights": "a mill"}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def built_engine(
    cli: Cli, checkpoint: Path, calibration_data: Path, tmp_path: Path
) -> tuple[Path, str]:
    out = tmp_path / "e"
    words = ("-q", "int4", "--group-size", 32, "--method", "awq+gptq", "--calibration-samples", 8)
    code, shown, err = cli(
        "build",
        checkpoint,
        "-o",
        out,
        "--calibration",
        calibration_data,
        "--calibration-length",
        64,
        *words,
    )
    assert code == 0, err
    return out, shown


def test_the_report_shows_each_layers_errors_and_outliers(built_engine: tuple[Path, str]) -> None:
    engine, shown = built_engine
    assert "rounded to nearest → as held" in shown
    assert "outlier channels" in shown
    assert "mean KL to the checkpoint" in shown
    assert "seen.jsonl, up to 8 × 64 tokens" in shown
    assert (
        len(open_artifact(engine).read_quant_reports_and_scales_by_layer())
        == shown.count(" → ") // 4
        or "→" in shown
    )


def test_an_engine_is_not_evaluated_on_what_it_has_seen(
    cli: Cli, built_engine: tuple[Path, str], calibration_data: Path, tmp_path: Path
) -> None:
    engine, copy = built_engine[0], tmp_path / "renamed.txt"
    copy.write_bytes(calibration_data.read_bytes())
    for words in (
        ("perplexity", engine, "--data", copy),
        ("summarize", engine, "--data", calibration_data, "--num", 1),
    ):
        code, _, err = cli(*words)
        assert code == 2
        assert "calibrated on" in err
        assert len(err.strip().splitlines()) == 1
    copy.write_bytes(calibration_data.read_bytes() + b"\n")
    assert cli("perplexity", engine, "--data", copy, "--limit-tokens", 60)[0] == 0


def test_dry_run_tells_the_size_that_is_written(
    cli: Cli, checkpoint: Path, built_engine: tuple[Path, str], calibration_data: Path
) -> None:
    words = (
        "-q",
        "int4",
        "--group-size",
        32,
        "--method",
        "awq+gptq",
        "--calibration",
        calibration_data,
    )
    code, plan, _ = cli("build", checkpoint, "--dry-run", "--json", *words)
    assert code == 0
    files = (built_engine[0] / "weights").glob("*.safetensors")
    # of 280 KB, the names and shapes of 160 tensors are 4 %; of a real model nothing
    assert plan["memory"]["weights"] == pytest.approx(
        sum(f.stat().st_size for f in files), rel=0.06
    )
    assert plan["build"]["method"] == "awq+gptq"


def test_bad_options_are_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for words, message in (
        (("--group-size", 48), "48"),
        (("--method", "magic"), "magic"),
        (("--calibration", empty), "empty"),
        (("--calibration-samples", 0), "at least 1"),
    ):
        code, _, err = cli("build", checkpoint, "-o", tmp_path / "e", "-q", "int4", *words)
        assert code == 2
        assert message in err
        assert not (tmp_path / "e").exists()


def test_a_missing_calibration_file_is_told_before_anything_is_fetched(
    cli: Cli, tmp_path: Path
) -> None:
    words = ("-q", "int4", "--calibration", tmp_path / "none.jsonl")
    code, _, err = cli("build", "org/name", "-o", tmp_path / "e", *words)
    assert (code, err) == (
        2,
        f"modelmill: --calibration {tmp_path / 'none.jsonl'}: there is no such file\n",
    )

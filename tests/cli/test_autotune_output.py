"""What ``build``, ``inspect`` and ``doctor`` print about launch configs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.autotune_store import (
    AutotuneRecord,
    autotune_record_path,
    encode_autotune_record,
)
from modelmill.artifact.manifest import Manifest
from modelmill.builder import autotune_measure

Cli = Callable[..., tuple[int, Any, str]]
H200 = "NVIDIA H200"
FACTS = {"steps": {"1": {"default_us": 100.0, "tuned_us": 95.0, "untried": 0}}}
TUNED = AutotuneRecord(H200, {"linear": {"1x64->64 bfloat16": (1, 64, 4)}}, FACTS)


@pytest.fixture
def tuned(engine: Path, tmp_path: Path) -> Path:
    """A copy of the engine with a file for an H200."""
    copy = tmp_path / "tuned.engine"
    shutil.copytree(engine, copy)
    path = copy / autotune_record_path(H200)
    path.parent.mkdir()
    path.write_bytes(encode_autotune_record(TUNED))
    return copy


def test_inspect_and_doctor_name_the_tuned_device(cli: Cli, tuned: Path, engine: Path) -> None:
    assert cli("inspect", tuned, "--json")[1]["tuning"]["devices"] == [H200]
    assert H200 in cli("inspect", tuned)[1]
    engine_facts = cli("doctor", tuned, "--json")[1]["engine"]
    assert engine_facts["tuning"]["devices"] == [H200]
    assert engine_facts["packing"] == "rows/2"
    assert H200 in cli("doctor", tuned)[1]
    assert "default launch configs" in cli("doctor", engine)[1] or torch.cuda.is_available()


def test_another_gpu_gets_a_note_that_it_runs_with_defaults(
    cli: Cli, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelmill.cli import inspect

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    here = inspect.tuning_facts(tuned)["here"]
    assert list(here) == ["NVIDIA A100"]
    assert "no tuning for NVIDIA A100" in here["NVIDIA A100"]
    assert "it was tuned for NVIDIA H200" in here["NVIDIA A100"]


def test_a_tuned_engine_is_as_whole_as_before(cli: Cli, tuned: Path) -> None:
    """The file lies outside the hashes."""
    assert cli("inspect", tuned, "--verify", "--json")[0] == 0


def test_an_engine_of_another_packing_is_refused_with_the_command(cli: Cli, tuned: Path) -> None:
    raw = json.loads((tuned / "manifest.json").read_text())
    raw.pop("digest")
    (tuned / "manifest.json").write_text(Manifest(**{**raw, "packing": "tiles/7"}).to_json())
    for verb in ("doctor", "inspect"):
        code, _, err = cli(verb, tuned)
        assert code == 1
        assert "modelmill build CHECKPOINT" in err
        assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_for_a_gpu_without_one_says_that_it_is_not_tuned(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    for words, message in (((), "no GPU here"), (("--no-tune",), "--no-tune")):
        out = tmp_path / "e.engine"
        code, _, err = cli(
            "build",
            checkpoint,
            "-o",
            out,
            "--target",
            "cuda",
            "--dtype",
            "float32",
            "--force",
            *words,
        )
        assert code == 0
        assert message in err
        assert not (out / "tuning").exists()


def test_what_a_build_tunes_is_in_the_engine_before_it_is_judged(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelmill.accept import run as accepting

    monkeypatch.setattr(autotune_measure, "autotune", lambda plan, progress: TUNED)
    judged = []
    real = accepting.run_engine_acceptance

    def spy(staged: Path, *rest: Any, **more: Any) -> Any:
        judged.append((staged / autotune_record_path(H200)).exists())
        return real(staged, *rest, **more)

    monkeypatch.setattr(accepting, "run_engine_acceptance", spy)
    out = tmp_path / "e.engine"
    assert cli("build", checkpoint, "-o", out, "--dtype", "float32", "--json")[0] == 0
    assert judged == [True]
    assert (out / autotune_record_path(H200)).read_bytes() == encode_autotune_record(TUNED)
    assert (
        cli("build", checkpoint, "-o", out, "--dtype", "float32", "--no-tune", "--force", "--json")[
            0
        ]
        == 0
    )
    assert not (out / "tuning").exists()


def test_a_build_shows_what_it_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    from modelmill.cli.build import show_tuning

    show_tuning(TUNED)
    out = capsys.readouterr().out
    assert "1 products" in out
    assert "95" in out

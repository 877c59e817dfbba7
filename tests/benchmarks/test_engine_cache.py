"""Engines kept between runs: what makes them is what finds them again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import engine_cache
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from tests.accept.build_and_accept import save_tiny

BUILD = ("--dtype", "float32", "-q", "int8")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small llama on disk."""
    return save_tiny("llama", tmp_path / "tiny")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The engines that were built, each by a build that writes nothing but a manifest."""
    made: list[Path] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        engine = Path(command[command.index("-o") + 1])
        engine.mkdir(parents=True)
        (engine / "manifest.json").write_text("{}")
        made.append(engine)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return made


def test_an_engine_is_built_once(checkpoint: Path, builds: list[Path], tmp_path: Path) -> None:
    first, seconds = engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path / "kept")
    again, none = engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path / "kept")
    assert (first, builds) == (again, [again])
    assert seconds is not None
    assert none is None
    engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path / "kept", fresh=True)
    assert len(builds) == 2


def test_what_other_code_built_is_not_measured_but_built_anew(
    checkpoint: Path,
    builds: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(engine_cache, "source_digest", lambda: "yesterday")
    older, _ = engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path)
    other, _ = engine_cache.build_or_reuse(checkpoint, (*BUILD, "--quantize-head"), tmp_path)
    monkeypatch.setattr(engine_cache, "source_digest", lambda: "today")
    newer, seconds = engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path)
    assert older is not None
    assert other is not None
    assert newer == builds[-1] != older
    assert seconds is not None
    assert not older.exists(), "what nothing asks for any more is not kept"
    assert other.exists()
    assert f"{older.name}: made by other sources" in capsys.readouterr().err


def touched(checkpoint: Path, calibration: Path) -> None:
    weights = next(checkpoint.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))


def rewritten(checkpoint: Path, calibration: Path) -> None:
    calibration.write_text('{"text": "other"}')


@pytest.mark.parametrize("change", [touched, rewritten])
def test_other_files_under_the_same_names_are_another_engine(
    change: Callable[[Path, Path], None], checkpoint: Path, tmp_path: Path
) -> None:
    calibration = tmp_path / "calibration.jsonl"
    calibration.write_text('{"text": "some"}')
    build = (*BUILD, "--calibration", str(calibration))
    before = engine_cache.engine_path(checkpoint, build, tmp_path)
    assert before == engine_cache.engine_path(checkpoint, build, tmp_path)
    change(checkpoint, calibration)
    assert before != engine_cache.engine_path(checkpoint, build, tmp_path)


@pytest.mark.parametrize(
    "file", ["quant/fp8.py", "weights/fp8.py", "ops/quant_types.py", "core/config.py"]
)
def test_the_sources_digest_sees_code_that_decides_weights(file: str, tmp_path: Path) -> None:
    assert (engine_cache.ROOT / "modelmill" / file).is_file()
    for name in (file, "serve/app.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    digest = engine_cache.source_digest.__wrapped__
    first = digest(tmp_path)
    (tmp_path / "serve/app.py").write_text("a = 2")
    assert digest(tmp_path) == first
    (tmp_path / file).write_text("a = 2")
    assert digest(tmp_path) != first


def test_the_content_is_the_weights_and_not_the_options(tmp_path: Path) -> None:
    def content(weights: str, build: str) -> str:
        files = {
            "weights/embedding_and_head.safetensors": {"sha256": weights},
            "quantization/0.json": {"sha256": build},
        }
        manifest = {
            "config": {"hidden_size": 8},
            "aliases": {},
            "files": files,
            "build": {"method": build},
        }
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        return engine_cache.engine_content_digest(tmp_path)

    assert content("a", "gptq") == content("a", "awq") != content("b", "gptq")


def test_a_refused_engine_is_none_and_a_failed_build_ends(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = SimpleNamespace(returncode=1, stderr="the engine was refused and not written: q_proj")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: process)
    assert engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path) == (None, None)
    process.stderr = "no space"
    with pytest.raises(SystemExit, match="ended with 1"):
        engine_cache.build_or_reuse(checkpoint, BUILD, tmp_path)


@pytest.mark.parametrize(
    ("quantization", "with_file"), [("rptq", True), ("rptq", False), ("int8", True)]
)
def test_the_calibration_of_a_refused_build_is_what_its_manifest_would_say(
    quantization: str, with_file: bool, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "news.jsonl"
    file.write_text('{"text": "some"}')
    options = {"calibration_samples": 5, "calibration_length": 10**6}
    words = ["-q", quantization, "--calibration-samples", "5", "--calibration-length", "1000000"]
    words += ["--calibration", str(file)] * with_file
    config = BuildConfig(
        quantization=quantization, calibration=str(file) if with_file else None, **options
    )
    source = make_build_plan(open_checkpoint(checkpoint), config).calibration
    planned = engine_cache.planned_calibration(checkpoint, words)
    assert planned == (None if source is None else source.to_json())
    assert (planned is None) == (quantization == "int8")

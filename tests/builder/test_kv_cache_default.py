"""An engine's own default for its KV cache: stored by build, used by every process that opens it,
and no fault
in acceptance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelmill.artifact.store import open_artifact
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import UsageError
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept, save_tiny

ROOM = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    report, written = build_and_accept(
        save_tiny("llama", folder / "hf"), folder / "e", "float32", "none", kv_cache_dtype="int8"
    )
    assert written, report.get("reason")
    return folder / "e"


@pytest.mark.parametrize(
    ("requested", "dtype"),
    [
        ("auto", torch.int8),
        ("activations", torch.float32),
        ("int8", torch.int8),
        ("fp8", torch.float8_e4m3fn),
    ],
)
def test_the_stored_default_holds_unless_another_is_asked_for(
    engine: Path, requested: str, dtype: torch.dtype
) -> None:
    assert open_artifact(engine).manifest.build["kv_cache_dtype"] == "int8"
    loop = EngineCore.open(
        engine, RunConfig(kv_cache_dtype=requested, kv_cache_bytes=ROOM, device="cpu")
    )
    assert loop.kv_dtype is dtype
    assert loop.model_runner.kv.k[0].dtype is dtype


def test_without_one_the_cache_is_as_the_activations(tmp_path: Path) -> None:
    _, written = build_and_accept(
        save_tiny("llama", tmp_path / "hf"), tmp_path / "e", "float32", "none"
    )
    assert written
    assert (
        EngineCore.open(tmp_path / "e", RunConfig(kv_cache_bytes=ROOM, device="cpu")).kv_dtype
        is torch.float32
    )


def test_the_plan_counts_its_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny("llama", tmp_path / "hf"))
    plain, eight = (
        make_build_plan(checkpoint, BuildConfig(target="cpu", kv_cache_dtype=k))
        for k in ("auto", "int8")
    )
    assert (
        eight.memory_report["kv_per_token"]
        == plain.memory_report["kv_per_token_8bit"]
        < plain.memory_report["kv_per_token"]
    )
    assert eight.resume_key() != plain.resume_key()


def test_activations_is_no_default_to_store() -> None:
    with pytest.raises(UsageError, match="--kv-cache-dtype 'activations'"):
        BuildConfig(kv_cache_dtype="activations")

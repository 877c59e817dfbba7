"""What a plan says of the memory of a build: against measured peaks, and against what is free."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelmill.accept.run import run_engine_acceptance
from modelmill.artifact.store import is_engine_folder
from modelmill.builder import build_engine, memory_plan
from modelmill.builder.memory_plan import BuildMemory
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core import memory_limits
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.models._sam_vit import SamVitSpec
from tests.models.tiny_models import save_hf
from tools.build_memory import CALIBRATED, SMALL, BuildCase, make, measure

of_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the peak of a process is read from /proc"
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_hf("llama", tmp_path / "hf")
    return tmp_path / "hf"


def plan(folder: Path, **options: Any) -> BuildPlan:
    return make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu", **options))


def leave_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(
        memory_limits, "read_memory_info", lambda: memory_limits.MemoryInfo(64 << 30, size)
    )


def plan_errors(cases: Sequence[BuildCase], folder: Path) -> dict[str, float]:
    """By how much of the measured peak each plan is off."""
    made = [make(case, folder / str(number)) for number, case in enumerate(cases)]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda pair: measure(pair[0], pair[1].options), zip(made, cases)))
    return {case.name: row["planned"] / row["measured"] - 1 for case, row in zip(cases, rows)}


@of_linux
def test_six_plans_are_within_15_percent_of_the_peak(tmp_path: Path) -> None:
    errors = plan_errors(SMALL, tmp_path)
    assert max(map(abs, errors.values())) <= 0.15, errors


@of_linux
def test_of_many_batches_only_one_is_inside_a_layer(tmp_path: Path) -> None:
    errors = plan_errors((CALIBRATED[0], CALIBRATED[-1]), tmp_path)
    assert max(map(abs, errors.values())) <= 0.15, errors


@pytest.mark.parametrize(("itemsize", "mib"), [(4, 2218), (2, 1796)])
def test_a_vit_is_judged_head_by_head(itemsize: int, mib: int) -> None:
    # mib: what a build of SAM's ViT-B with random weights allocated (VmHWM less what is mapped and
    # the process)
    planned = memory_plan.encoder_acceptance_bytes(
        SamVitSpec(width=768, depth=12, heads=12, global_attn_indexes=(2, 5, 8, 11), inner=3072),
        0,
        itemsize,
    )
    assert abs(planned / (mib << 20) - 1) <= 0.15


def test_a_build_that_does_not_fit_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = plan(llama), tmp_path / "x.engine"
    leave_free(monkeypatch, made.build_memory.peak_buffer_bytes - 1)
    with pytest.raises(
        UsageError, match=r"needs .* of memory and .* are free.*--no-check needs"
    ) as refused:
        build_engine.build(
            made, out, lambda staged, it: run_engine_acceptance(staged, it.checkpoint)
        )
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    build_engine.build(made, out, None)
    assert is_engine_folder(out), "unjudged it takes less"


def test_no_way_out_is_named_where_there_is_none(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, 1 << 20)
    with pytest.raises(UsageError) as refused:
        plan(llama).build_memory.check_free_memory("it", with_acceptance=True)
    assert "--no-check" not in str(refused.value)


def test_the_peak_is_of_the_costliest_stage() -> None:
    memory = BuildMemory(
        projected_process_bytes=100,
        mapped_bytes=10,
        write_buffer_bytes=1,
        calibration_bytes=3,
        acceptance_bytes=2,
    )
    assert (memory.peak_buffer_bytes, memory.peak_bytes) == (3, 113)
    assert BuildMemory(100, 10, 1, 0, 2).without_acceptance().peak_buffer_bytes == 1


def test_wider_and_rounded_layers_take_more(llama: Path) -> None:
    plain, rounded = plan(llama, dtype="float32"), plan(llama, dtype="float32", quantization="int8")
    checkpoint, vocab = plain.checkpoint, plain.model_config.vocab
    of_plain, of_rounded = (
        memory_plan.acceptance_bytes(
            checkpoint, list(each.tensors) * 5000, vocab, plain.model_config.hidden
        )
        for each in (plain, rounded)
    )
    assert of_plain < of_rounded
    assert memory_plan.write_buffer_bytes(
        checkpoint, plain.tensors
    ) < memory_plan.write_buffer_bytes(checkpoint, rounded.tensors)
    assert memory_plan.mapped_bytes(checkpoint, plain.tensors) > plain.weight_bytes


def test_planning_loads_no_compiler_of_torch(llama: Path) -> None:
    # torch computes shapes of the meta device by sympy: 120 MB and a second, for an arange
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from modelmill.builder.plan import make_build_plan\nfrom modelmill.checkpoint.open import "
        "open_checkpoint\n"
        "from modelmill.core.config import BuildConfig\n"
        f"make_build_plan(open_checkpoint(Path({str(llama)!r})), BuildConfig(target='cpu'))\n"
        "assert 'sympy' not in sys.modules, 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

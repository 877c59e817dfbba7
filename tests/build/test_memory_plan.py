"""What a plan says of the memory of a build: against measured peaks, and against what is free."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelmill.accept.run import accept
from modelmill.artifact.store import is_engine
from modelmill.build import builder, memory_plan
from modelmill.build.memory_plan import BuildMemory
from modelmill.build.plan import Plan, make_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core import ram
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from tests.models.tiny_models import save_hf
from tools.build_memory import SMALL, make, measure


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_hf("llama", tmp_path / "hf")
    return tmp_path / "hf"


def plan(folder: Path, **options: Any) -> Plan:
    return make_plan(open_checkpoint(folder), BuildConfig(target="cpu", **options))


def leave_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(ram, "memory", lambda: ram.Memory(64 << 30, size))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_six_plans_are_within_15_percent_of_the_peak(tmp_path: Path) -> None:
    made = [make(case, tmp_path / str(number)) for number, case in enumerate(SMALL)]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda pair: measure(pair[0], pair[1].options), zip(made, SMALL)))
    off = {case.name: row["planned"] / row["measured"] - 1 for case, row in zip(SMALL, rows)}
    assert max(map(abs, off.values())) <= 0.15, off


def test_a_build_that_does_not_fit_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = plan(llama), tmp_path / "x.engine"
    leave_free(monkeypatch, made.build_memory.allocated - 1)
    with pytest.raises(UsageError, match=r"needs .* of memory and .* are free.*--no-check needs") as refused:
        builder.build(made, out, lambda staged, it: accept(staged, it.checkpoint))
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    builder.build(made, out, None)
    assert is_engine(out), "unjudged it takes less"


def test_no_way_out_is_named_where_there_is_none(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, 1 << 20)
    with pytest.raises(UsageError) as refused:
        plan(llama).build_memory.check("it", judged=True)
    assert "--no-check" not in str(refused.value)


def test_the_peak_is_of_the_costliest_stage() -> None:
    memory = BuildMemory(process=100, mapped=10, writing=1, calibrating=3, judging=2)
    assert (memory.allocated, memory.peak) == (3, 113)
    assert BuildMemory(100, 10, 1, 0, 2).without_judging().allocated == 1


def test_wider_and_rounded_layers_take_more(llama: Path) -> None:
    plain, rounded = plan(llama, dtype="float32"), plan(llama, dtype="float32", quantization="int8")
    checkpoint, vocab = plain.checkpoint, plain.sizes.vocab
    of_plain, of_rounded = (
        memory_plan.judging_bytes(checkpoint, list(each.pieces) * 5000, vocab, plain.sizes.hidden)
        for each in (plain, rounded)
    )
    assert of_plain < of_rounded
    assert memory_plan.writing_bytes(checkpoint, plain.pieces) < memory_plan.writing_bytes(checkpoint, rounded.pieces)
    assert memory_plan.mapped_bytes(checkpoint, plain.pieces) > plain.weight_bytes


def test_planning_loads_no_compiler_of_torch(llama: Path) -> None:
    # torch computes shapes of the meta device by sympy: 120 MB and a second, for an arange
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from modelmill.build.plan import make_plan\nfrom modelmill.checkpoint.open import open_checkpoint\n"
        "from modelmill.core.config import BuildConfig\n"
        f"make_plan(open_checkpoint(Path({str(llama)!r})), BuildConfig(target='cpu'))\n"
        "assert 'sympy' not in sys.modules, 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

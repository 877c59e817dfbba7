"""What ``modelmill doctor`` says of kernels, and prints for an issue with ``--report``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from modelmill.artifact.store import Artifact
from modelmill.cli import doctor
from modelmill.cli.main import run_command_line
from modelmill.loader import model_loader
from modelmill.models import gemma2
from tests.models.all_families import CASES


def test_the_report_for_an_issue_has_the_versions_and_no_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command_line(["doctor", "--report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("* ") for line in lines)
    assert lines[0].startswith("* modelmill ")
    assert "Python" in lines[0]
    text = "\n".join(lines)
    assert "torch" in text
    assert "rms_norm" in text
    assert str(Path.home()) not in text
    assert "/usr/" not in text


def test_on_an_amd_gpu_each_kernel_that_is_not_offered_has_its_reason() -> None:
    pytest.importorskip("triton")
    from tools.gpu_generations import GENERATIONS, fake_gpu

    with fake_gpu(GENERATIONS[0], hip="6.4"):
        rows = {
            row["op"]: row for row in doctor._op_variant_facts(torch) if row["device"] == "cuda"
        }
    attention = rows["paged_attention"]
    assert attention["chosen"] == "torch"
    assert attention["available"] == ["torch"]
    assert "not offered on AMD GPUs (ROCm)" in attention["unavailable"]["triton"]
    assert "not for AMD's (ROCm)" in attention["unavailable"]["cuda"]
    assert rows["upsample_masks"]["chosen"] == "triton", "it has neither PTX nor PDL"


def test_an_engine_says_which_layers_keep_which_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = CASES["gemma2"].raw(num_hidden_layers=6, max_position_embeddings=512)
    raw.pop("layer_types", None)
    model = gemma2.Model(gemma2.config_from_hf(raw | {"sliding_window": 20}))
    monkeypatch.setattr(model_loader, "build_rank_model", lambda *_: model)
    manifest = SimpleNamespace(build={"target": "cpu"}, max_model_len=512, weight_formats={})
    engine = cast(Artifact, SimpleNamespace(manifest=manifest))
    expected = [{"window": None, "layers": 3}, {"window": 20, "layers": 3}]
    assert doctor._count_layers_by_kv_window(engine) == expected
    manifest.max_model_len = 20
    assert doctor._count_layers_by_kv_window(engine) == [{"window": None, "layers": 6}]

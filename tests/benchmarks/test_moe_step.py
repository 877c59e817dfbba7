"""The benchmark of experts, with two narrow layers on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import moe_step

TINY = "--device cpu --layers 2 --hidden 64 --inner 32 --experts 8 --top-k 2 --rounds 1"


def test_every_format_becomes_rows_beside_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32})
    path = tmp_path / "rows.jsonl"
    words = [*TINY.split(), "--batch", "1", "--prompt", "5", "--save", str(path)]
    timings = moe_step.main(words)
    assert [(each.weight_format, each.tokens) for each in timings] == [
        (name, tokens) for name in moe_step.FORMATS for tokens in (1, 5)
    ]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for timing, row in zip(timings, rows, strict=True):
        assert timing.experts_per_layer == 2 or timing.tokens == 5
        assert timing.floor_ms > 0
        assert timing.error < 0.1
        assert row["value"] == pytest.approx(timing.step_ms, abs=1e-5)
        assert row["shape"]["layers"] == 2
        assert {"commit", "ceilings", "device"} <= row.keys()


def test_what_a_named_backend_does_not_serve_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32})
    formats = ["--format", "dense", "--format", "int4", "--batch", "1"]
    kernels = ["--kernel", "cpu", "--kernel", "cuda"]
    timings = moe_step.main([*TINY.split(), *formats, *kernels])
    assert [(each.weight_format, each.kernel) for each in timings] == [("int4", "cpu")]
    assert capsys.readouterr().out.count("not served") == 3


def test_a_layers_experts_lie_next_to_each_other() -> None:
    shape = moe_step.MoEShape(layers=1, hidden=64, inner=32, experts=4, top_k=2)
    with torch.inference_mode():
        (layer,) = moe_step.make_layers(shape, "int4", "cpu")
    weights = [expert.down_proj.weight.weight for expert in layer.plain.experts]  # type: ignore[union-attr]
    starts = [weight.data_ptr() - weights[0].data_ptr() for weight in weights]
    assert starts == [weights[0].nbytes * index for index in range(4)]

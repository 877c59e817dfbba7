"""The script that measures recipes: its sums against plain formulas, its rows, its table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import fidelity as fidelity_module
from benchmarks import quantization as bench
from benchmarks import result_rows
from benchmarks.fidelity import FidelitySums, cached_logits, measure_fidelity, split_windows

VOCAB = 11


class FakeLoop:
    """Logits from a table by (token, position) plus noise of its own; hands them out in two
    chunks.
    """

    device = "cpu"

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, 64, VOCAB, generator=generator)
        self.table += noise * torch.randn(self.table.shape, generator=generator)
        self.model_runner = SimpleNamespace(sampler=SimpleNamespace(vocab=VOCAB))
        self.runs = 0
        files = {"manifest.json": {"bytes": 5}, "weights/a": {"bytes": 7}}
        build = {
            "quantization": "int4",
            "method": "gptq",
            "dtype": "float32",
            "group_size": 64,
            "symmetric": False,
        }
        weights = {"layers.0.a": "int4", "head": "dense"}
        manifest = SimpleNamespace(build=build, files=files, weight_formats=weights, source={})
        self.artifact = SimpleNamespace(manifest=manifest, tokenizer_files=lambda: {})

    def logits(self, ids: list[int]) -> torch.Tensor:
        return torch.stack([self.table[id, at] for at, id in enumerate(ids)])

    def run_sequences(self, windows: list[list[int]], decode_from: Any, take: Any) -> None:
        self.runs += 1
        for which, ids in enumerate(windows):
            half = len(ids) // 2
            take(which, 0, self.logits(ids)[:half])
            take(which, half, self.logits(ids)[half:])


@pytest.fixture(autouse=True)
def _score_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_module, "TeacherForcedScorer", lambda loop: loop)


def test_windows_do_not_overlap_and_leave_out_a_lone_token() -> None:
    assert split_windows(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert split_windows(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_the_measures_are_those_of_the_formulas(tmp_path: Path) -> None:
    ids = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(5)).tolist()
    windows = split_windows(ids, 64)
    plain, other = FakeLoop(0.0), FakeLoop(0.5)
    expected = cached_logits(lambda: plain, windows, tmp_path / "r", lambda *_: None)
    assert torch.equal(expected, torch.cat([plain.logits(w) for w in windows]))
    fidelity = measure_fidelity(other, windows, expected, lambda *_: None)

    nats, kl, same, scored = 0.0, [], 0, 0
    for window in windows:
        p, q = (loop.logits(window).double().softmax(-1) for loop in (plain, other))
        kl += [float((p[t] * (p[t] / q[t]).log()).sum()) for t in range(len(window))]
        same += sum(int(p[t].argmax()) == int(q[t].argmax()) for t in range(len(window)))
        for t, token in enumerate(window[1:]):
            nats, scored = nats - float(q[t, token].log()), scored + 1
    assert fidelity["perplexity"] == pytest.approx(
        torch.tensor(nats / scored, dtype=torch.float64).exp().item(), rel=1e-9
    )
    assert fidelity["mean_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-9)
    assert fidelity["max_kl"] == pytest.approx(max(kl), rel=1e-9)
    assert fidelity["agreement"] == same / len(kl)


def test_an_engine_against_itself_differs_by_nothing() -> None:
    loop = FakeLoop(0.0)
    window = [1, 2, 3, 4]
    fidelity = measure_fidelity(loop, [window], loop.logits(window), lambda *_: None)
    assert fidelity["mean_kl"] == 0.0
    assert fidelity["agreement"] == 1.0


def test_kept_logits_are_not_computed_again(tmp_path: Path) -> None:
    loop = FakeLoop(0.0)
    windows = [[1, 2, 3]]
    first = cached_logits(lambda: loop, windows, tmp_path / "r", lambda *_: None)
    again = cached_logits(
        lambda: pytest.fail("computed again"), windows, tmp_path / "r", lambda *_: None
    )
    assert torch.equal(first, again)
    cached_logits(lambda: loop, [[1, 2, 4]], tmp_path / "r", lambda *_: None)
    assert loop.runs == 2


def test_rows_of_a_lone_last_token_are_scored_by_no_target() -> None:
    sums = FidelitySums()
    sums.add(torch.zeros(2, VOCAB), None, torch.tensor([3, -1]))
    assert sums.scored == 1
    assert sums.facts() == {"perplexity": pytest.approx(VOCAB)}


@pytest.fixture
def base_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line whose builds are fake."""
    text = tmp_path / "text.txt"
    text.write_text("x" * 90)
    monkeypatch.setattr(
        bench.engine_cache,
        "build_or_reuse",
        lambda checkpoint, build, folder, fresh=False: (Path("-".join(build)), 1.0),
    )
    monkeypatch.setattr(bench.engine_cache, "engine_content_digest", lambda engine: engine.name)
    monkeypatch.setattr(
        bench,
        "open_engine_core",
        lambda engine, *_: FakeLoop(0.0 if str(engine) == "--dtype-float32" else 0.5),
    )
    monkeypatch.setattr(
        bench,
        "encode_text",
        lambda loop, text, count: [i * 7 % VOCAB for i in range(len(text))][:count],
    )
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "rows.jsonl")]
    return ["model.gguf", "--text", str(text), "--window", "32", "--tokens", "80", *folders]


def test_a_row_says_what_was_asked_and_is_written_once(
    base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    command = [*base_args, "--", "-q", "int4", "--group-size", "64"]
    assert bench.main(command) == 0
    assert bench.main(command) == 0
    (row,) = bench.read_rows(tmp_path / "rows.jsonl")
    assert row["options"] == "-q int4 --group-size 64"
    assert (row["recipe"], row["method"], row["group"], row["bytes"]) == ("int4", "gptq", 64, 12)
    assert row["command"].startswith("python benchmarks/quantization.py model.gguf")
    assert (row["tokens"], row["windows"]) == (80, 3)
    assert row["excess"] == pytest.approx(row["perplexity"] / row["float32"] - 1)
    assert row["kinds"] == {"int4": 1}
    assert {"device", "versions", "date", "mean_kl", "agreement"} <= set(row)
    message = capsys.readouterr().err
    assert "stands already: -q int4" in message
    monkeypatch.setattr(bench.engine_cache, "source_digest", lambda: "later")
    assert bench.main(command) == 0
    assert "stands already, of other sources than today's: -q int4" in capsys.readouterr().err
    bench.main(
        [*base_args[:-2], "--again", *base_args[-2:], "--", "-q", "int4", "--group-size", "64"]
    )
    assert len(bench.read_rows(tmp_path / "rows.jsonl")) == 2
    capsys.readouterr()
    bench.main(["--report", "--results", str(tmp_path / "rows.jsonl")])
    shown = capsys.readouterr().out
    assert shown.count("-q int4 --group-size 64") == 1
    assert f"{row['perplexity']:.4f}" in shown


def test_a_refused_engine_is_a_row_too(
    base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plain = bench.FLOAT32
    monkeypatch.setattr(
        bench.engine_cache,
        "build_or_reuse",
        lambda _, build, *more: (Path("e") if tuple(build) == plain else None, None),
    )
    calibration = {"name": "news.jsonl", "samples": 96, "length": 512, "sha256": "0" * 64}
    monkeypatch.setattr(
        bench.engine_cache,
        "planned_calibration",
        lambda _, build: calibration if build == (*plain, "-q", "int4") else None,
    )
    bench.main([*base_args, "--", "-q", "int4"])
    bench.main([*base_args, "--whole-inputs", "--", "-q", "int4"])
    row, whole = bench.read_rows(tmp_path / "rows.jsonl")
    assert row["accepted"] is False
    assert row["calibration"] == whole["calibration"] == calibration
    assert "whole_inputs" not in row
    assert whole["whole_inputs"] is True, "the page tells the two by it"
    assert "refused" in capsys.readouterr().out


def test_another_kv_type_is_another_row(base_args: list[str]) -> None:
    plain, build = bench.parse_args([*base_args, "--", "-q", "int8"])
    other, same = bench.parse_args([*base_args, "--kv-cache-dtype", "int8", "--", "-q", "int8"])
    assert build == same
    assert result_rows.row_key(plain, build) != result_rows.row_key(other, same)


def test_the_text_that_was_calibrated_on_is_refused(
    base_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    from modelmill.core.errors import UsageError

    loop = FakeLoop(0.0)
    digest = hashlib.sha256(Path(base_args[2]).read_bytes()).hexdigest()
    facts = {"name": "text.txt", "sha256": digest, "samples": 1, "length": 1}
    loop.artifact.manifest.source = {"calibration": facts}
    monkeypatch.setattr(bench, "open_engine_core", lambda *_: loop)
    with pytest.raises(UsageError, match="calibrated on"):
        bench.main([*base_args, "--", "-q", "int4"])


def test_rows_are_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert bench.read_rows(file) == []
    file.write_text(json.dumps({"key": "a"}) + "\n")
    assert bench.read_rows(file) == [{"key": "a"}]


def test_a_row_names_commit_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELMILL_COMMIT", "0123456789ab")
    row = bench.row_provenance("cpu")
    assert row["commit"] == "0123456789ab"
    assert row["host_cpu"]
    assert row["host_cores"] > 0

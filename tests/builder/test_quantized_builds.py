"""Building with a recipe: sizes as planned, bit-identical, resumable inside the calibration, bad
data named.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.artifact.store import open_artifact, quantization_facts_path
from modelmill.builder import build_engine
from modelmill.builder.calibration_data import (
    MIN_CALIBRATION_TOKENS,
    check_calibration_ids,
    find_calibration_source,
    generate_builtin_text,
    load_calibration_ids,
    load_calibration_samples,
    read_calibration_texts,
)
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CorruptArtifact, UsageError
from modelmill.quant import calibrate
from tests.accept.build_and_accept import save_tiny
from tests.builder.test_build_engine import digest

SMALL = {"calibration_samples": 4, "calibration_length": 60, "group_size": 32}


def plan(folder: Path, **options: Any) -> Any:
    return make_build_plan(
        open_checkpoint(folder),
        BuildConfig(**{"target": "cpu", "quantization": "int4"} | SMALL | options),
    )


def make(folder: Path, out: Path, **options: Any) -> Path:
    build_engine.build(plan(folder, **options), out, None)
    return out


def two_builds_are_equal(folder: Path, tmp_path: Path, **options: Any) -> None:
    first, second = (digest(make(folder, tmp_path / name, **options)) for name in "ab")
    assert first == second


def goes_on_after_two_layers(
    folder: Path, tmp_path: Path, monkeypatch: Any, **options: Any
) -> None:
    """Finished layers are not quantized again, and the rest comes out as if nothing had
    happened.
    """
    real, quantized_layers = calibrate.quantize_layer, []

    def interrupted(*args: Any, layer_name: str, **more: Any) -> Any:
        if layer_name == "layers.2" and len(quantized_layers) == 2:
            raise KeyboardInterrupt
        quantized_layers.append(layer_name)
        return real(*args, layer_name=layer_name, **more)

    monkeypatch.setattr("modelmill.builder.layer_quantizer.quantize_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(folder, tmp_path / "e", **options)
    quantized_layers.append("again")
    make(folder, tmp_path / "e", **options)
    assert quantized_layers == ["layers.0", "layers.1", "again", "layers.2"]
    monkeypatch.undo()
    assert digest(tmp_path / "e") == digest(make(folder, tmp_path / "fresh", **options))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "hf")


@pytest.mark.parametrize("method", ["nearest", "awq+gptq"])
def test_the_engine_is_as_large_as_planned(llama: Path, tmp_path: Path, method: str) -> None:
    build_plan = plan(llama, method=method)
    artifact = open_artifact(make(llama, tmp_path / "e", method=method))
    stored = {name: artifact.tensor(name) for name in artifact.names()}
    assert sum(t.nbytes for t in stored.values()) == build_plan.weight_bytes
    assert build_plan.describe()["bytes_by_format"]["int4"] == sum(
        t.nbytes for name, t in stored.items() if "_proj" in name and not name.endswith("bias")
    )
    assert set(artifact.manifest.weight_formats.values()) == {"int4", "dense"}
    assert artifact.manifest.weight_formats["head"] == "dense"


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16", "method": "awq+gptq"}, {"method": "nearest"}], ids=str
)
def test_two_builds_are_bit_identical(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    two_builds_are_equal(llama, tmp_path, **options)


@pytest.mark.parametrize("family", ["llama-bias", "gpt2"])
def test_an_interrupted_calibration_goes_on_where_it_was(
    family: str, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = save_tiny(family, tmp_path / "hf")
    goes_on_after_two_layers(folder, tmp_path, monkeypatch, dtype="bfloat16", method="awq+gptq")


def test_what_was_done_is_kept_with_the_engine(llama: Path, tmp_path: Path) -> None:
    engine = make(llama, tmp_path / "e", method="awq+gptq")
    artifact = open_artifact(engine)
    facts_by_layer = artifact.read_quant_reports_and_scales_by_layer()
    assert sorted(facts_by_layer) == [0, 1, 2]
    for facts, scales in facts_by_layer.values():
        assert all(fact["after"] < fact["before"] for fact in facts.values())
        assert all(s.dtype == torch.float32 and bool((s > 0).all()) for s in scales.values())
    assert artifact.manifest.build["method"] == "awq+gptq"
    source = artifact.manifest.source["calibration"]
    assert source["name"] == "modelmill's own text"
    assert artifact.manifest.build["calibration"] == f"sha256:{source['sha256']}"
    assert quantization_facts_path(1) in artifact.manifest.files
    (engine / quantization_facts_path(1)).write_text(
        json.dumps({"facts": {}, "scales": {"qkv": 3}})
    )
    with pytest.raises(CorruptArtifact, match="layer-0001"):
        artifact.read_quant_reports_and_scales_by_layer()


def test_progress_is_reported_layer_by_layer(llama: Path, tmp_path: Path) -> None:
    updates: list[tuple[str, int, int]] = []
    build_engine.build(plan(llama), tmp_path / "e", None, lambda *each: updates.append(each))
    steps = [(done, total) for stage, done, total in updates if stage == "quantizing layers"]
    assert len(steps) >= 4
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_auto_is_the_best_measured_and_needs_no_file(llama: Path) -> None:
    made = plan(llama)
    assert made.config.method != "auto"
    assert "best measured" in made.reasons["method"]
    assert "own text" in made.reasons["calibration"]
    plain = make_build_plan(open_checkpoint(llama), BuildConfig(target="cpu"))
    assert made.build_memory.calibration_bytes > 0 == plain.build_memory.calibration_bytes


# -- calibration data
# ---------------------------------------------------------------------------


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_texts_are_read_by_any_of_their_keys(tmp_path: Path) -> None:
    message = {
        "messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]
    }
    path = lines(
        tmp_path / "t.jsonl",
        {"text": "a"},
        {"article": "b", "highlights": "x"},
        {"prompt": "c"},
        message,
    )
    assert list(read_calibration_texts(path)) == ["a", "b", "c", "d\ne"]


@pytest.mark.parametrize(
    ("line", "message"), [("[1]", "line 2: has no text"), ("{", "line 2: is not JSON")]
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(UsageError, match=message):
        list(read_calibration_texts(path))


def test_the_file_decides_the_engine_and_its_name_does_not(llama: Path, tmp_path: Path) -> None:
    one, same = (
        lines(tmp_path / "a.jsonl", {"text": "a" * 99}),
        lines(tmp_path / "b.jsonl", {"text": "a" * 99}),
    )
    other = lines(tmp_path / "c.jsonl", {"text": "b" * 99})
    keys = [plan(llama, calibration=str(path)).resume_key() for path in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert (
        plan(llama, calibration=str(one)).config.calibration
        == f"sha256:{hashlib.sha256(one.read_bytes()).hexdigest()}"
    )


def test_what_needs_no_statistics_reads_no_file(llama: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    made = plan(llama, method="nearest", calibration=str(path))
    assert made.calibration is None
    assert made.config.calibration is None
    assert "not used" in made.reasons["calibration"]


def test_a_file_that_is_not_there_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        plan(llama, calibration=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "%s"}\n{"txt": "b"}' % ("a" * 99), "line 2: has no text under text, article"),
        ("no json", "line 1: is not JSON"),
        ("", "is empty; at least 128 tokens are needed"),
        ('{"text": "a word"}', "is too short: it has 6 bytes of text; at least 128 tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_the_plan(
    shared: Path, tmp_path: Path, text: str, message: str
) -> None:
    """Before weights are read."""
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"--calibration {path}.*{message}"):
        plan(shared / "data/models/stories260K", calibration=str(path))


def test_a_model_without_tokenizer_cannot_read_texts(llama: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(UsageError, match="no tokenizer"):
        make(llama, tmp_path / "e", calibration=str(path))


def test_too_little_is_named_and_nothing_is_written(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too short"):
        make(llama, tmp_path / "e", calibration_samples=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_file_that_says_too_little_is_named(tmp_path: Path) -> None:
    model = SimpleNamespace(config=SimpleNamespace(vocab=300))
    files = {"gguf_vocab.json": b""}
    with mock.patch("modelmill.builder.calibration_data.load_calibration_ids",
        return_value=[]), mock.patch(
        "modelmill.builder.calibration_data.chat_supports_images", return_value=False
    ):  # fmt: skip
        path = lines(tmp_path / "none.jsonl", {"text": ""})
        source = find_calibration_source(BuildConfig(calibration=str(path)), 40)
        with pytest.raises(UsageError, match=r"--calibration .*none\.jsonl is empty: .*; pass"):
            load_calibration_samples(source, files, model, 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ([[1] * (MIN_CALIBRATION_TOKENS - 1)], "too short"),
        ([[5] * 500, [50]], "token ids must be between"),
    ],
)
def test_bad_calibration_ids_are_named(ids: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_calibration_ids(ids, 50)


def test_our_own_text_is_the_same_every_time_and_enough() -> None:
    text = generate_builtin_text()
    assert text == generate_builtin_text.__wrapped__(), "drawn once more"
    assert len(text) > 300_000, "96 × 512 tokens of about four letters"
    assert "{person}" not in text
    assert "{thing}" not in text
    assert len(set(text.split("\n\n"))) > 700


def test_random_ids_of_a_model_without_tokenizer() -> None:
    source = find_calibration_source(BuildConfig(calibration_samples=3, calibration_length=50), 40)
    ids = load_calibration_ids(source, {}, 17, seed=0)
    assert (
        ids
        == load_calibration_ids(source, {}, 17, seed=0)
        != load_calibration_ids(source, {}, 17, seed=1)
    )
    assert [len(one) for one in ids] == [40] * 3
    assert {i for one in ids for i in one} == set(range(17))


def test_another_version_builds_anew(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a cached engine nor half of one that another version has built is taken for this
    one's.
    """
    before = plan(llama).resume_key()
    assert plan(llama).resume_key() == before
    monkeypatch.setattr("modelmill.__version__", "0.0.0")
    assert plan(llama).resume_key() != before

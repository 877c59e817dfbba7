"""An engine folder may come from anywhere: what is wrong with it is one line, and nothing outside
it is touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.artifact.shard import ShardReader
from modelmill.artifact.store import open_artifact
from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import ArtifactError, CorruptArtifact, ModelmillError
from modelmill.runtime.engine_core import EngineCore
from tests.checkpoint.checkpoint_factory import llama_state, write_folder
from tests.trust.error_lines import check_one_line

HOSTILE: list[Any] = [
    None,
    0,
    -1,
    1.5,
    2**40,
    10**400,
    math.nan,
    "",
    "x\n",
    True,
    [],
    [1],
    {},
    {"a": 1},
    {"a": []},
]
SMALL = RunConfig(device="cpu", kv_cache_bytes=1 << 20, max_num_seqs=4)


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    plan = make_build_plan(
        open_checkpoint(write_folder(folder / "hf", llama_state())), BuildConfig(target="cpu")
    )
    build_engine.build(plan, folder / "good.engine", None)
    return folder / "good.engine"


@pytest.fixture
def engine(built_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(built_folder, tmp_path / "x.engine"))


def forged(engine: Path, **changes: Any) -> None:
    """A manifest with other values and a digest that fits them: what an attacker writes."""
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    (engine / MANIFEST_FILE).write_text(replace(good, **changes).to_json())


def refusal(engine: Path) -> str:
    with pytest.raises(ModelmillError) as raised:
        EngineCore.open(engine, SMALL)
    return check_one_line(raised.value)


def test_the_good_one_opens(engine: Path) -> None:
    assert EngineCore.open(engine, SMALL).vocab == 20


@pytest.mark.parametrize("field", list(Manifest.__dataclass_fields__))
def test_any_value_in_any_field_with_a_digest_that_fits(
    engine: Path, built_folder: Path, field: str
) -> None:
    for value in HOSTILE:
        shutil.copy(built_folder / MANIFEST_FILE, engine / MANIFEST_FILE)
        try:
            forged(engine, **{field: value})
            EngineCore.open(engine, SMALL)
        except ModelmillError as error:
            check_one_line(error)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_theta"]
)
def test_any_value_in_the_config(engine: Path, built_folder: Path, key: str) -> None:
    good = Manifest.from_json((built_folder / MANIFEST_FILE).read_text(), "e")
    for value in HOSTILE:
        try:
            (engine / MANIFEST_FILE).write_text(
                replace(good, config={**good.config, key: value}).to_json()
            )
            EngineCore.open(engine, SMALL)
        except ModelmillError as error:
            check_one_line(error)


OUTSIDE = [
    "../secret",
    "/etc/passwd",
    "weights/../../secret",
    ".",
    "",
    "weights//x",
    "a\0b",
    "a\nb",
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_manifest_that_points_outside(engine: Path, name: str) -> None:
    secret = engine.parent / "secret"
    secret.write_bytes(b"secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    forged(engine, files={**good.files, name: entry})
    with pytest.raises(CorruptArtifact, match="outside the engine") as raised:
        open_artifact(engine)
    check_one_line(raised.value)


def test_missing_extra_and_empty_weight_files(engine: Path) -> None:
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    (engine / "weights" / "stranger.safetensors").write_bytes(b"never read")
    assert EngineCore.open(engine, SMALL).vocab == 20
    name = next(n for n in good.files if n.endswith(".safetensors"))
    forged(engine, files={n: e for n, e in good.files.items() if n != name})
    assert "lacks the tensor" in refusal(engine)
    forged(engine, files=good.files)
    (engine / name).write_bytes(b"")
    assert name in refusal(engine)
    (engine / name).unlink()
    assert f"{name} is missing" in refusal(engine)


def test_one_tensor_in_two_files(engine: Path) -> None:
    """Which of the two would count must not depend on an order."""
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    name = next(n for n in good.files if n.endswith(".safetensors"))
    shutil.copy(engine / name, engine / "weights" / "again.safetensors")
    forged(engine, files={**good.files, "weights/again.safetensors": good.files[name]})
    assert "which another file holds too" in refusal(engine)


def replace_header(engine: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A weight file whose header was changed, with hashes and sizes that fit."""
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    name = next(n for n in good.files if n.endswith("embedding_and_head.safetensors"))
    data = (engine / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (
        json.dumps(header if text is None else text).encode()
        if not isinstance(text, bytes)
        else text
    )
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (engine / name).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    forged(engine, files={**good.files, name: entry})


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["norm.weight"].update(shape=[2**62, 4]),
        lambda h: h["norm.weight"].update(shape=[-1, -32]),
        lambda h: h["norm.weight"].update(shape=[2**70]),
        lambda h: h["norm.weight"].update(data_offsets=[0, 2**63]),
        lambda h: h["norm.weight"].update(data_offsets=[-4096, -4096 + 128]),
        lambda h: h["norm.weight"].update(data_offsets=[1, 129]),
        lambda h: h["norm.weight"].update(dtype="I64"),
        lambda h: h["norm.weight"].update(dtype=["F32"]),
        lambda h: h["norm.weight"].update(shape=[64]),
        lambda h: h.update({"norm.weight": 5}),
        lambda h: h.update({"stranger.weight": h["norm.weight"]}),
        lambda h: h.pop("norm.weight") and None,
        lambda h: [1, 2],
        lambda h: b"[" * 10**5,
        lambda h: b"\xff",
    ],
    ids=range(15),
)
def test_a_weight_file_that_lies_about_itself(
    engine: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    replace_header(engine, change)
    refusal(engine)


def test_any_flipped_bit_anywhere_is_found(engine: Path) -> None:
    draw = random.Random(0)
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    for name in [*good.files, MANIFEST_FILE]:
        data = bytearray((engine / name).read_bytes())
        for _ in range(5):
            place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
            data[place] ^= bit
            (engine / name).write_bytes(data)
            assert name in refusal(engine)
            data[place] ^= bit
        (engine / name).write_bytes(data)
    assert EngineCore.open(engine, SMALL).vocab == 20


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b"[" * 10**5, b'{"schema": {"a": "b\\n"}}', b"9" * 9999]
)
def test_a_manifest_that_is_none(engine: Path, text: bytes) -> None:
    (engine / MANIFEST_FILE).write_bytes(text)
    with pytest.raises(ArtifactError) as raised:
        open_artifact(engine)
    check_one_line(raised.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5])
def test_a_damaged_report_is_one_line(engine: Path, text: bytes) -> None:
    (engine / "acceptance.json").write_bytes(text)
    with pytest.raises(CorruptArtifact, match=r"acceptance\.json") as raised:
        open_artifact(engine).acceptance_report()
    check_one_line(raised.value)


def test_writing_to_a_loaded_weight_never_reaches_the_file(engine: Path) -> None:
    path = next((engine / "weights").glob("*.safetensors"))
    before = path.read_bytes()
    reader = ShardReader(path)
    reader.get_tensor(reader.names()[0]).fill_(7.0)
    assert path.read_bytes() == before


def test_loading_runs_nothing_the_folder_brings(engine: Path) -> None:
    """auto_map and a Python file beside the weights are what other loaders ran."""
    good = Manifest.from_json((engine / MANIFEST_FILE).read_text(), "e")
    forged(engine, config={**good.config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (engine / "evil.py").write_text("raise SystemExit('ran')")
    (engine / "sitecustomize.py").write_text("raise SystemExit('ran')")
    loop = EngineCore.open(engine, SMALL)
    assert torch.isfinite(TeacherForcedScorer(loop).compute_logits([[1, 2, 3]])[0]).all()
    assert asdict(good)["config"]["model_type"] == "llama"

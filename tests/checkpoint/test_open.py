from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UnknownArchitecture
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    llama_state,
    write_folder,
    write_llama_gguf,
    write_tensors,
)

STATE = llama_state()


def assert_whole(opened) -> None:
    assert opened.model_type == "llama"
    assert sorted(opened.names()) == sorted(STATE)
    for name, tensor in STATE.items():
        assert opened.tensor_info(name).shape == tuple(tensor.shape)
        assert torch.equal(opened.get(name), tensor)


def test_the_same_model_opens_from_every_container(tmp_path):
    config = json.dumps(LLAMA_CONFIG)
    write_folder(tmp_path / "hf", STATE)
    (tmp_path / "bin").mkdir()
    torch.save(STATE, tmp_path / "bin/pytorch_model.bin")
    (tmp_path / "bin/config.json").write_text(config)
    (tmp_path / "pth").mkdir()
    torch.save({"model": STATE}, tmp_path / "pth/weights.pth")
    (tmp_path / "pth/config.json").write_text(config)
    for container_name, index, suffix in (
        ("safe", "model.safetensors.index.json", "safetensors"),
        ("bins", "pytorch_model.bin.index.json", "bin"),
    ):
        folder = tmp_path / container_name
        folder.mkdir()
        halves = [dict(list(STATE.items())[i::2]) for i in range(2)]
        for i, half in enumerate(halves):
            file = folder / f"m-{i}.{suffix}"
            save_file(half, str(file)) if suffix == "safetensors" else torch.save(half, file)
        weight_map = {name: f"m-{i}.{suffix}" for i, half in enumerate(halves) for name in half}
        (folder / index).write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(config)
    (tmp_path / "gguf").mkdir()
    write_llama_gguf(tmp_path / "gguf/m.gguf", STATE)

    expected = {
        "hf": "safetensors",
        "hf/model.safetensors": "safetensors",
        "safe": "safetensors",
        "bin": "pth",
        "bin/pytorch_model.bin": "pth",
        "bins": "pth",
        "pth": "pth",
        "pth/weights.pth": "pth",
        "gguf": "gguf",
        "gguf/m.gguf": "gguf",
    }
    for where, container in expected.items():
        opened = open_checkpoint(tmp_path / where)
        assert opened.container == container
        assert_whole(opened)
        assert opened.config["num_key_value_heads"] == 2
    gguf = open_checkpoint(tmp_path / "gguf/m.gguf")
    assert "blk.0.attn_q.weight" in gguf.raw_container.names()
    assert list(gguf.tokenizer_files()) == ["gguf_vocab.json"]


def test_side_files_come_along_and_code_does_not(tmp_path):
    config = {
        **LLAMA_CONFIG,
        "auto_map": {"AutoModelForCausalLM": "modeling.Evil"},
        "trust_remote_code": True,
    }
    folder = write_folder(tmp_path / "m", STATE, config)
    (folder / "modeling.py").write_text("raise SystemExit('the code ran')")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "qwen.tiktoken").write_bytes(b"t")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "generation_config.json").write_text('{"top_p": 0.8}')
    opened = open_checkpoint(folder)
    assert set(opened.tokenizer_files()) == {
        "tokenizer.json",
        "qwen.tiktoken",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert opened.generation_config == {"top_p": 0.8}
    assert opened.config["auto_map"]
    assert_whole(opened)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, CheckpointError, r"config\.json: is missing"),
        ("{", CorruptCheckpoint, "not valid JSON"),
        ("[1]", CorruptCheckpoint, "no JSON object"),
        ("[" * 100_000, CorruptCheckpoint, "not valid JSON"),
        ("\udcff", CorruptCheckpoint, "not valid JSON"),
        ("{}", UnknownArchitecture, "model_type"),
        ('{"model_type": 3}', UnknownArchitecture, "model_type"),
    ],
)
def test_a_broken_config_is_one_line(tmp_path, text, error, message):
    folder = write_folder(tmp_path / "m", STATE)
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_huge_side_file_is_refused_unread(tmp_path):
    folder = write_folder(tmp_path / "m", STATE)
    with (folder / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json: has 1099511627776 bytes"):
        open_checkpoint(folder)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"not a \.gguf"):
        open_checkpoint(tmp_path / "model.onnx")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path / "pipe.gguf")
    for name in "ab":
        write_llama_gguf(tmp_path / f"{name}.gguf", STATE)
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        open_checkpoint(tmp_path)


def test_parts_of_a_split_gguf_are_refused_with_the_remedy(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m-00001-of-00002.gguf"), "llama")
    writer.add_uint16("split.count", 2)
    write_tensors(writer)
    with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_fingerprints_follow_content_and_not_the_place(tmp_path):
    one = open_checkpoint(write_folder(tmp_path / "one", STATE))
    two = open_checkpoint(write_folder(tmp_path / "two", STATE))
    assert one.fingerprint() == two.fingerprint()
    changed = {**STATE, "model.norm.weight": STATE["model.norm.weight"] + 1}
    three = open_checkpoint(write_folder(tmp_path / "three", changed))
    assert three.fingerprint() != one.fingerprint()
    four = open_checkpoint(
        write_folder(tmp_path / "four", STATE, {**LLAMA_CONFIG, "rope_theta": 1.0})
    )
    assert four.fingerprint() != one.fingerprint()
    (tmp_path / "two/tokenizer.json").write_text("{}")
    assert open_checkpoint(tmp_path / "two").fingerprint() != one.fingerprint()


def test_the_quick_fingerprint_sees_touches_and_progress_is_reported(tmp_path):
    folder = write_folder(tmp_path / "m", STATE)
    before = open_checkpoint(folder)
    quick = before.quick_fingerprint()
    assert quick == open_checkpoint(folder).quick_fingerprint()
    updates: list[tuple[str, int, int]] = []
    before.fingerprint(lambda *update: updates.append(update))
    size = (folder / "model.safetensors").stat().st_size
    assert updates[-1] == ("fingerprint", size, size)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert open_checkpoint(folder).quick_fingerprint() != quick
    assert open_checkpoint(folder).fingerprint() == before.fingerprint()


def test_the_real_tiny_llama_opens(shared):
    opened = open_checkpoint(shared / "data/models/stories260K")
    assert opened.model_type == "llama"
    assert opened.get("model.embed_tokens.weight").shape == (512, 64)
    assert len(opened.names()) == 5 * 9 + 2


def test_a_links_target_may_lie_elsewhere(tmp_path):
    """The hub's cache keeps files as links into another folder."""
    folder = write_folder(tmp_path / "m", STATE)
    (tmp_path / "blobs").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "blobs/1")
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs/1")
    assert_whole(open_checkpoint(folder))


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "added_tokens.json",
    ],
)
def test_files_that_only_describe_a_tokenizer_are_none(tmp_path, name):
    """save_pretrained writes generation_config.json for every model, with or without a
    tokenizer.
    """
    folder = write_folder(tmp_path / "m", llama_state())
    (folder / name).write_text("{}")
    assert open_checkpoint(folder).tokenizer_files() == {}
    (folder / "tokenizer.json").write_text("{}")
    assert set(open_checkpoint(folder).tokenizer_files()) == {name, "tokenizer.json"}


@pytest.mark.parametrize(
    "change", [(b"tokenizer.ggml.model", b"tokenizer.ggml.other"), (b"gpt2", b"none")]
)
def test_a_gguf_without_a_vocabulary_has_no_tokenizer(tmp_path, change):
    path = write_llama_gguf(tmp_path / "m.gguf", llama_state())
    assert open_checkpoint(path).tokenizer_files()
    path.write_bytes(path.read_bytes().replace(*change))
    assert open_checkpoint(path).tokenizer_files() == {}


def test_a_name_of_the_hub_is_fetched_first(tmp_path, monkeypatch):
    """The Python API fetches nothing, so it must not ask for the name that it was given."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"with: modelmill pull org/name, and give the print"):
        open_checkpoint(Path("org/name"))
    with pytest.raises(CheckpointError, match=r"give a checkpoint's folder or file$"):
        open_checkpoint(tmp_path / "none.gguf")

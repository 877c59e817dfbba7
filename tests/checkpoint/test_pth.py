from __future__ import annotations

import json
import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.checkpoint.pth import INDEX_FILE, PthFiles
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, TensorMismatch
from tests.checkpoint.checkpoint_factory import opens_or_fails_in_one_line

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class RunsCode:
    """Pickles as a call: what a hostile file does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(path: Path, content: object, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: OrderedDict(s),
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"state_dict": s, "optimizer": {"lr": 0.1}},
        lambda s: {**s, "version": "1"},
        lambda s: {name: torch.nn.Parameter(tensor) for name, tensor in s.items()},
    ],
)
def test_tensors_are_found_wherever_frameworks_put_them(tmp_path, wrap, zipped):
    files = PthFiles([save(tmp_path / "m.pth", wrap(STATE), zipped)])
    assert sorted(files.names()) == sorted(STATE)
    for name, tensor in STATE.items():
        assert torch.equal(files.get(name), tensor)
        assert not files.get(name).requires_grad
        assert files.tensor_info(name).shape == tuple(tensor.shape)
        assert files.tensor_info(name).decoded_dtype == tensor.dtype
    with pytest.raises(TensorMismatch, match="'nobody'"):
        files.get("nobody")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_never_runs(tmp_path, zipped):
    trace = tmp_path / "it-ran"
    path = save(tmp_path / "evil.bin", {**STATE, "x": RunsCode(trace)}, zipped)
    with pytest.raises(CheckpointError, match="holds more than tensors, refusing") as caught:
        PthFiles([path])
    assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "no table of named tensors"),
        (torch.ones(2), "no table of named tensors"),
        ({"a": 1}, "holds no tensors"),
        ({"a": torch.ones(2, 2).to_sparse()}, "no plain dense tensor"),
    ],
)
def test_what_is_no_table_of_dense_tensors_is_refused(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        PthFiles([save(tmp_path / "m.pth", content)])


def test_a_tensor_that_repeats_one_stored_value_is_refused(tmp_path):
    path = save(tmp_path / "m.pth", {"w": torch.ones(1).expand(1 << 40)})
    with pytest.raises(CorruptCheckpoint, match="claims more values"):
        PthFiles([path])


def test_archives_that_inflate_are_refused(tmp_path):
    path = save(tmp_path / "m.pth", STATE)
    with zipfile.ZipFile(path) as source:
        parts = {entry.filename: source.read(entry) for entry in source.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in parts.items():
            target.writestr(name, data + b"\0" * 100_000)
    with pytest.raises(CorruptCheckpoint, match="compressed entries"):
        PthFiles([path])


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.booleans())
def test_damaged_files_are_an_error_line(tmp_path, data, zipped):
    path = save(tmp_path / "m.pth", STATE, zipped)
    bad = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bad[: data.draw(st.integers(0, len(bad)))])
    opens_or_fails_in_one_line(PthFiles, path, len(bad))


def test_shards_follow_their_index(tmp_path):
    for i, (name, tensor) in enumerate(STATE.items()):
        save(tmp_path / f"{i}.bin", {name: tensor})
    weight_map = {name: f"{i}.bin" for i, name in enumerate(STATE)}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    files = PthFiles.from_index(tmp_path)
    assert sorted(files.names()) == sorted(STATE)
    assert [f.name for f in files.files()] == ["0.bin", "1.bin"]

    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {**weight_map, "c": "0.bin"}}))
    with pytest.raises(CorruptCheckpoint, match="no shard holds: c"):
        PthFiles.from_index(tmp_path)
    save(tmp_path / "1.bin", STATE)
    with pytest.raises(CorruptCheckpoint, match="another shard"):
        PthFiles.from_index(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../0.bin"}}))
    with pytest.raises(CorruptCheckpoint, match="outside its folder"):
        PthFiles.from_index(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.pth: is missing"):
        PthFiles([tmp_path / "none.pth"])


def test_a_plain_pickle_is_refused_without_torchs_remarks(tmp_path: Path) -> None:
    """Pickled by itself, with a protocol that torch does not write: torch would warn on two lines
    before.
    """
    path = tmp_path / "plain.pth"
    path.write_bytes(
        b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
    )
    with pytest.raises(CorruptCheckpoint, match="UnpicklingError"):
        PthFiles([path])

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelmill.checkpoint.safetensors import TORCH_DTYPES, SafetensorsFiles, read_header
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, TensorMismatch
from tests.checkpoint.checkpoint_factory import llama_state, opens_or_fails_in_one_line

RELAXED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
        lambda n: n != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@RELAXED
@given(tensors)
def test_whatever_is_written_is_read_back(tmp_path, drawn):
    state = {}
    for name, (dtype, shape) in drawn.items():
        state[name] = torch.randint(0, 2, shape).to(TORCH_DTYPES[dtype])
    save_file(state, str(tmp_path / "m.safetensors"), metadata={"format": "pt"})
    files = SafetensorsFiles([tmp_path / "m.safetensors"])
    assert sorted(files.names()) == sorted(state)
    assert files.metadata == {"format": "pt"}
    for name, tensor in state.items():
        actual, info = files.get(name), files.tensor_info(name)
        assert (info.shape, info.decoded_dtype, info.nbytes) == (
            tuple(tensor.shape),
            tensor.dtype,
            tensor.nbytes,
        )
        assert actual.dtype == tensor.dtype
        assert torch.equal(
            actual.view(torch.uint8) if actual.numel() and actual.dim() else actual.float(),
            tensor.view(torch.uint8) if actual.numel() and actual.dim() else tensor.float(),
        )


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(llama_state(), str(path))
    return path


@RELAXED
@given(st.data())
def test_a_damaged_file_is_an_error_line_or_reads_within_its_size(tmp_path, model, data):
    good = model.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.sampled_from([len(good), header, header - 1, 7, 0, len(good) - 1]))]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bad)
    tracemalloc.start()
    opens_or_fails_in_one_line(SafetensorsFiles, path, len(bad))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 22  # the file has 70 kB, the lies promise exabytes


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8)}, b"\0" * 4, "is truncated"),
        ({"a": entry([2], 0, 8)}, b"\0" * 9, "belong to no tensor"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, b"\0" * 8, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, b"\0" * 16, "leaves a gap"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "takes 12 bytes"),
        ({"a": entry([1 << 62, 4], 0, 0)}, b"", "takes"),
        ({"a": entry([1 << 62, 0], 0, 0)}, b"", "of shape"),
        ({"a": entry([-1], 0, 8)}, b"\0" * 8, "no proper"),
        ({"a": entry([True], 0, 4)}, b"\0" * 4, "no proper"),
        ({"a": entry([2.0], 0, 8)}, b"\0" * 8, "no proper"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "takes 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "no proper"),
        ({"a": 1}, b"", "no JSON object"),
        ([1], b"", "no JSON object"),
        ({"__metadata__": []}, b"", "__metadata__"),
        (b'{"a": {}, "a": {}}', b"", "appears twice"),
        (b"[" * 100_000, b"", "not valid"),
        (b"{", b"", "not valid"),
        (b"\xff", b"", "not valid"),
    ],
)
def test_every_lie_of_a_header_has_its_line(tmp_path, header, data, message):
    path = raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CorruptCheckpoint, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 8, 9])
def test_files_too_short_for_a_header(tmp_path, size):
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\xff" * size)
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        read_header(path)


def test_unknown_dtypes_are_named(tmp_path):
    path = raw(tmp_path / "new.safetensors", {"w": entry([2], 0, 1, "F4")}, b"\0")
    with pytest.raises(CheckpointError, match="'w' has the dtype 'F4'"):
        read_header(path)


def test_missing_files_and_names_are_named(tmp_path, model):
    with pytest.raises(CheckpointError, match="is missing"):
        SafetensorsFiles([tmp_path / "none.safetensors"])
    files = SafetensorsFiles([model])
    for ask in (files.get, files.tensor_info):
        with pytest.raises(TensorMismatch, match="'nobody'"):
            ask("nobody")


def shards(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"a": torch.ones(2)}, str(folder / "m-1.safetensors"))
    save_file({"b": torch.zeros(2)}, str(folder / "m-2.safetensors"))
    index = {"weight_map": weight_map or {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_one_container(tmp_path):
    files = SafetensorsFiles.from_index(shards(tmp_path))
    assert files.names() == ["a", "b"]
    assert torch.equal(files.get("b"), torch.zeros(2))
    assert [f.name for f in files.files()] == ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "m-1.safetensors", "c": "m-2.safetensors"}, "no shard holds: c"),
        ({"a": "m-2.safetensors", "b": "m-1.safetensors"}, "wrong shard for a, b"),
        ({"a": "m-3.safetensors"}, "m-3.safetensors, which is missing"),
        ({"a": "../m-1.safetensors"}, "outside its folder"),
        ({"a": "/etc/passwd"}, "outside its folder"),
        ({"a": ".."}, "outside its folder"),
        ({"a": "..\\x"}, "outside its folder"),
        ({"a": 3}, "names no file"),
        ([], "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, weight_map, message):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpoint, match=message):
        SafetensorsFiles.from_index(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, str(tmp_path / "m-2.safetensors"))
    with pytest.raises(CorruptCheckpoint, match=r"m-1\.safetensors holds too"):
        SafetensorsFiles.from_index(tmp_path)


def test_a_file_that_changed_after_opening_is_an_error_line(tmp_path, model):
    files = SafetensorsFiles([model])
    model.write_bytes(b"\xff" * 100)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        files.get("lm_head.weight")

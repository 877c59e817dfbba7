"""Weight files that lie: refused in one line, quickly, before memory is taken, and never by running
them.
"""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modelmill.checkpoint.container import format_names
from modelmill.checkpoint.open import open_checkpoint
from modelmill.checkpoint.pth import PthFiles
from modelmill.checkpoint.safetensors import SafetensorsFiles, read_header
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from tests.checkpoint.checkpoint_factory import LLAMA_CONFIG, llama_state, write_folder
from tests.trust.error_lines import check_one_line
from tests.wait import time_limit


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A PyTorch archive whose entries were changed; None leaves one out."""
    out = path.with_name("changed.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return out


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(4, 4), "v": torch.zeros(64)}, tmp_path / "m.pth")
    return tmp_path / "m.pth"


NUMEL = (b"K\x10", b"J\xff\xff\xff\x7f")  # a storage of 16 values; of 2³¹ − 1


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: data.replace(*NUMEL) if name.endswith("data.pkl") else data,
        lambda name, data: data[:5] if name.endswith("data/0") else data,
        lambda name, data: None if name.endswith("data/0") else data,
        lambda name, data: b"" if name.endswith("data.pkl") else data,
        lambda name, data: data.replace(b"K\x04K\x04\x86", b"J\xff\xff\xff\x7fK\x04\x86"),
        lambda name, data: data.replace(b"K\x04K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86"),
    ],
    ids=[
        "storage too long",
        "entry too short",
        "entry missing",
        "no description",
        "huge shape",
        "negative shape",
    ],
)
def test_an_archive_that_lies_about_its_tensors(
    pth: Path, change: Callable[[str, bytes], bytes | None]
) -> None:
    """A mapped storage must not reach into its neighbour or behind the file, where reading is a
    crash.
    """
    lie = rewritten(pth, change)
    with pytest.raises(CorruptCheckpoint, match=r"changed\.pth") as raised:
        PthFiles([lie])
    check_one_line(raised.value)
    assert PthFiles([rewritten(pth, lambda name, data: data)]).get("w").sum() == 16


@pytest.mark.parametrize("zipped", [True, False])
def test_any_flipped_byte_is_a_line_or_a_tensor(pth: Path, zipped: bool) -> None:
    torch.save(torch.load(pth, weights_only=True), pth, _use_new_zipfile_serialization=zipped)
    good, draw = pth.read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        pth.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
        try:
            file = PthFiles([pth])
            for name in file.names():
                assert file.get(name).double().sum().shape == ()
        except CheckpointError as error:
            check_one_line(error)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return open, (str(Path(__file__).with_name("exploded")), "w")


@pytest.mark.parametrize("location", ["raw", "archive", "legacy", "inside a tensor table"])
def test_a_pickle_bomb_never_goes_off(tmp_path: Path, location: str) -> None:
    path = write_folder(tmp_path / "m", llama_state()) / "pytorch_model.bin"
    (path.parent / "model.safetensors").unlink()
    content = (
        {"state_dict": {"w": torch.ones(1), "x": Bomb()}}
        if location == "inside a tensor table"
        else {"w": Bomb()}
    )
    if location == "raw":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=location != "legacy")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as raised:
        open_checkpoint(path.parent)
    check_one_line(raised.value)
    assert not Path(__file__).with_name("exploded").exists()


def safetensors(path: Path, header: object, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2**47] * 300_000, "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**66]}},
        {"w": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"w": {"dtype": "x" * 10**6, "shape": [1], "data_offsets": [0, 4]}},
        {"w" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        {"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [4, 0]}},
        b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b',"199999":1}',
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        b"[" * 10**6,
        b'{"\x1b[2J":1}',
        b"\xff\xfe{}",
    ],
    ids=range(15),
)
def test_a_header_that_lies(tmp_path: Path, header: object) -> None:
    path = safetensors(tmp_path / "m.safetensors", header, b"\0\0\0\0")
    with time_limit(), pytest.raises(CheckpointError, match=r"m\.safetensors") as raised:
        read_header(path)
    check_one_line(raised.value)


@pytest.mark.parametrize(
    "shard", ["/etc/passwd", "../other.safetensors", "..", "C:x", "a/b", "a\0b", "", ["x"], None, 5]
)
def test_an_index_that_points_elsewhere(tmp_path: Path, shard: object) -> None:
    folder = write_folder(tmp_path / "m", llama_state())
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (folder / index).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
        with pytest.raises(CheckpointError, match=index.replace(".", r"\.")) as raised:
            open_checkpoint(folder)
        check_one_line(raised.value)
        (folder / index).unlink()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Folders, devices and pipes under a weight file's name are refused and not read."""
    import os

    folder = write_folder(tmp_path / "m", llama_state())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    safetensors(folder / "model.safetensors", {})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_names_in_an_error_stay_short_and_printable() -> None:
    names = ["a\x1b[31m", "b" * 10**6, *(f"c{i}" for i in range(10**4))]
    assert len(format_names(names)) < 1000
    assert format_names(names).isprintable()


def test_a_file_swapped_after_opening_is_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_state(), LLAMA_CONFIG)
    weights = SafetensorsFiles([folder / "model.safetensors"])
    safetensors(
        folder / "model.safetensors",
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        b"\0" * 4,
    )
    with pytest.raises(CorruptCheckpoint):
        weights.get("model.norm.weight")

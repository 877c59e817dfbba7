"""Weight files: written as a stream, read through mmap, readable by the safetensors library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.artifact.shard import TENSOR_ALIGNMENT_BYTES, ShardReader, ShardWriter
from modelmill.core.errors import CorruptArtifact

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32]


def tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    out = {}
    for i, shape in enumerate(shapes):
        dtype = DTYPES[i % len(DTYPES)]
        out[f"t{i}"] = (torch.randn(shape) * 50).to(dtype)
    return out


def write(path: Path, content: dict[str, torch.Tensor]) -> dict[str, int | str]:
    with ShardWriter(path, {n: (tuple(t.shape), t.dtype) for n, t in content.items()}) as writer:
        for name, tensor in content.items():
            writer.add_tensor(name, tensor)
        return writer.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]]
) -> None:
    path = tmp_path_factory.mktemp("shard") / "w.safetensors"
    content = tensors(shapes)
    facts = write(path, content)
    assert facts["bytes"] == path.stat().st_size
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    reader = ShardReader(path)
    assert reader.names() == list(content)
    library = safetensors.torch.load_file(path)
    for name, tensor in content.items():
        assert torch.equal(reader.get_tensor(name), tensor)
        assert torch.equal(library[name], tensor)


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, tensors([(3,), (5, 7), (1,), (9,), (2, 2, 2)]))
    reader = ShardReader(path)
    for name in reader.names():
        tensor = reader.get_tensor(name)
        assert tensor.storage_offset() * tensor.element_size() % TENSOR_ALIGNMENT_BYTES == 0


def test_writing_to_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.ones(16)})
    ShardReader(path).get_tensor("a").zero_()
    assert torch.equal(ShardReader(path).get_tensor("a"), torch.ones(16))


def test_the_announced_order_and_shape_are_kept(tmp_path: Path) -> None:
    infos = {"a": ((2,), torch.float32), "b": ((3,), torch.float32)}
    with (
        ShardWriter(tmp_path / "w", infos) as writer,
        pytest.raises(AssertionError, match="b written where a"),
    ):
        writer.add_tensor("b", torch.zeros(3))
    with (
        ShardWriter(tmp_path / "w", infos) as writer,
        pytest.raises(AssertionError, match="announced"),
    ):
        writer.add_tensor("a", torch.zeros(3))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_is_refused_not_crashed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("shard") / "w.safetensors"
    write(path, {"a": torch.arange(64.0), "b": torch.ones(8, dtype=torch.int8)})
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), 200) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        reader = ShardReader(path)
        for name in reader.names():
            reader.get_tensor(name)
    except CorruptArtifact:
        pass

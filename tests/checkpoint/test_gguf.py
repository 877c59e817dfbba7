from __future__ import annotations

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.checkpoint.gguf import GgufFile
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, TensorMismatch
from tests.checkpoint.checkpoint_factory import llama_state, write_llama_gguf, write_tensors
from tests.hypothesis_examples import examples

RELAXED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

PLAIN = [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64]
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
values = st.one_of(
    st.tuples(st.just("add_uint8"), st.integers(0, 2**8 - 1)),
    st.tuples(st.just("add_int8"), st.integers(-(2**7), 2**7 - 1)),
    st.tuples(st.just("add_uint16"), st.integers(0, 2**16 - 1)),
    st.tuples(st.just("add_int16"), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just("add_uint32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("add_int32"), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just("add_uint64"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("add_int64"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("add_float32"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("add_float64"), st.floats(allow_nan=False)),
    st.tuples(st.just("add_bool"), st.booleans()),
    st.tuples(st.just("add_string"), names),
    st.tuples(st.just("add_array"), st.lists(names, min_size=1, max_size=4)),
    st.tuples(st.just("add_array"), st.lists(st.integers(0, 1000), min_size=1, max_size=4)),
    st.tuples(st.just("add_array"), st.lists(st.booleans(), min_size=1, max_size=4)),
    st.tuples(
        st.just("add_array"), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4)
    ),
)


@RELAXED
@given(
    st.dictionaries(names, values, max_size=6),
    st.dictionaries(
        names,
        st.tuples(st.sampled_from(PLAIN), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    ),
    st.sampled_from([8, 32, 256]),
)
def test_what_the_gguf_package_writes_is_read_back(tmp_path, metadata, drawn, alignment):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_custom_alignment(alignment)
    metadata = {f"x.{key}": value for key, value in metadata.items()}
    for key, (method, value) in metadata.items():
        getattr(writer, method)(key, value)
    state = {}
    for name, (dtype, shape) in drawn.items():
        state[name] = np.random.default_rng(1).integers(-100, 100, shape).astype(dtype)
        writer.add_tensor(name, state[name])
    write_tensors(writer)

    file = GgufFile(tmp_path / "m.gguf")
    for key, (_, value) in metadata.items():
        actual = file.metadata[key]
        assert (actual.tolist() if isinstance(actual, np.ndarray) else actual) == value
    assert file.names() == list(state)
    for name, array in state.items():
        actual = file.get(name)
        assert file.tensor_info(name).shape == array.shape
        assert file.tensor_info(name).decoded_dtype == actual.dtype
        np.testing.assert_array_equal(actual.numpy(), array)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_stored_blocks_are_expanded(tmp_path, name, monkeypatch):
    monkeypatch.setattr("modelmill.checkpoint.gguf.CHUNK_VALUES", 64)
    ggml_type = gguf.GGMLQuantizationType[name]
    data = quantize(np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32), ggml_type)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("w", data, raw_dtype=ggml_type)
    write_tensors(writer)
    file = GgufFile(tmp_path / "m.gguf")
    assert file.tensor_info("w").shape == (5, 64)
    assert file.tensor_info("w").nbytes == data.nbytes
    assert file.tensor_info("w").dtype == ("bfloat16" if name == "BF16" else name)
    np.testing.assert_array_equal(file.get("w").float().numpy(), dequantize(data, ggml_type))


def test_types_without_expansion_are_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    ggml_type = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("w", np.zeros((2, 18), np.uint8), raw_dtype=ggml_type)
    write_tensors(writer)
    with pytest.raises(CheckpointError, match="IQ4_NL"):
        GgufFile(tmp_path / "m.gguf").get("w")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_llama_gguf(path, llama_state()).read_bytes()


def header_size(data: bytes) -> int:
    return len(data) - sum(t.nbytes for t in llama_state().values())


@settings(
    deadline=None,
    max_examples=examples(250, 60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_damaged_header_is_one_line_and_costs_no_memory(tmp_path, good, data):
    bad, end = bytearray(good), header_size(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, end - 8))
        new = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(b"\0" * 4))
        )
        bad[at : at + len(new)] = new
    path = tmp_path / "bad.gguf"
    path.write_bytes(bad[: data.draw(st.sampled_from([len(good), end, end // 2, 30]))])
    line = str(path)
    tracemalloc.start()
    try:
        file = GgufFile(path)
        for name in file.names():
            assert file.tensor_info(name).nbytes <= path.stat().st_size
            if file.tensor_info(name).dtype == "float32":
                file.get(name)
    except CheckpointError as error:
        line = str(error)
    assert str(path) in line
    assert "\n" not in line
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 22  # the file has 80 kB, the lies promise exabytes


class Writer:
    """A GGUF header byte by byte, for the lies a library would not write."""

    def __init__(self, tensors: int, pairs: int, version: int = 3) -> None:
        self.data = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)

    def text(self, text: str | bytes, length: int | None = None) -> Writer:
        text = text.encode() if isinstance(text, str) else text
        self.data += struct.pack("<Q", len(text) if length is None else length) + text
        return self

    def put(self, struct_format: str, *numbers: int) -> Writer:
        self.data += struct.pack("<" + struct_format, *numbers)
        return self

    def tensor(self, name: str, dims: list[int], ggml_type: int = 0, offset: int = 0) -> Writer:
        return self.text(name).put(f"I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)


LIES = [
    (b"", "is not a GGUF file"),
    (b"GGUF", "is not a GGUF file"),
    (b"GGML" + b"\0" * 40, "is not a GGUF file"),
    (Writer(0, 1 << 31).data, "claims 2147483648 metadata entries"),
    (Writer(1 << 62, 0).data, "tensors"),
    (Writer(0, 1).text("key", 1 << 40).put("40Q", *[0] * 40).data, "key of 1099511627776 bytes"),
    (Writer(0, 1).text(b"\xff\xfe").put("3Q", 0, 0, 0).data, "not UTF-8"),
    (Writer(0, 1).text("k").put("I", 13).put("3Q", 0, 0, 0).data, "unknown type 13"),
    (Writer(0, 1).text("k").put("I", 8).text("v", 1 << 50).put("Q", 0).data, "claims"),
    (Writer(0, 1).text("k").put("IIQ", 9, 4, 1 << 62).data, "values of 'k'"),
    (Writer(0, 1).text("k").put("IIQ", 9, 8, 1 << 30).put("Q", 0).data, "values of 'k'"),
    (
        Writer(0, 1).text("k").put("IIQIQIQIQIQIQ", 9, *[9, 1] * 6).put("8Q", *[0] * 8).data,
        "too deeply",
    ),
    (
        Writer(0, 2).text("k").put("IB", 0, 1).text("k").put("IB", 0, 1).put("Q", 0).data,
        "'k' twice",
    ),
    (Writer(0, 1).text("general.alignment").put("II", 4, 0).data, "alignment of 0"),
    (Writer(0, 1).text("general.alignment").put("II", 4, 48).data, "alignment of 48"),
    (Writer(0, 1).text("general.alignment").put("II", 4, 1 << 31).data, "alignment of 2147483648"),
    (Writer(0, 1).text("general.alignment").put("I", 8).text("x").data, "alignment of 'x'"),
    (Writer(1, 0).text("w").put("I", 5).put("8Q", *[1] * 8).data, "5 dimensions"),
    (Writer(1, 0).tensor("w", [1 << 40]).data, "says 'w' has"),
    (Writer(1, 0).tensor("w", [1 << 32, 1 << 32]).data, "says 'w' has"),
    (Writer(1, 0).tensor("w", [1 << 63, 2]).data, "says 'w' has"),
    (Writer(1, 0).tensor("w", [1 << 63, 0]).data, "says 'w' has"),
    (Writer(1, 0).tensor("w", [4], 0, 1 << 60).data, "says 'w' has"),
    (Writer(1, 0).tensor("w", [4], 0, 8).data + b"\0" * 99, "not aligned"),
    (Writer(1, 0).tensor("w", [31], 2).data + b"\0" * 99, "Q4_0 blocks"),
    (Writer(1, 0).tensor("w", [8], 0).data + b"\0" * 8, "truncated"),
    (Writer(2, 0).tensor("w", [2]).tensor("w", [2], 0, 32).data + b"\0" * 99, "'w' twice"),
    (Writer(2, 0).tensor("v", [16]).tensor("w", [2], 0, 32).data + b"\0" * 999, "overlapping 'v'"),
    (Writer(2, 0).tensor("v", [2]).tensor("w", [2]).data + b"\0" * 999, "overlapping"),
]


@pytest.mark.parametrize(("data", "message"), LIES, ids=range(len(LIES)))
def test_every_lie_has_its_line(tmp_path, data, message):
    (tmp_path / "lie.gguf").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=message) as caught:
        GgufFile(tmp_path / "lie.gguf")
    assert "lie.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (Writer(0, 0, version=1).data, "version 1"),
        (Writer(0, 0, version=9).data, "version 9"),
        (Writer(1, 0).tensor("w", [4], 4).data + b"\0" * 99, "unknown ggml type number 4"),
    ],
)
def test_what_we_do_not_read_is_said_to_be_so(tmp_path, data, message):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "m.gguf")


def test_version_2_is_read(tmp_path):
    data = Writer(1, 0, version=2).tensor("w", [2]).data
    data += b"\0" * (-len(data) % 32) + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "m.gguf").write_bytes(data)
    assert GgufFile(tmp_path / "m.gguf").get("w").tolist() == [1.5, -2.0]


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path):
    (tmp_path / "m.gguf").write_bytes(
        Writer(0, 1).text("k").put("I", 8).text(b"a\xffb").put("Q", 0).data
    )
    assert (
        GgufFile(tmp_path / "m.gguf").metadata["k"].encode("utf-8", "surrogateescape") == b"a\xffb"
    )


def test_a_file_that_shrinks_after_opening_is_an_error_line(tmp_path, good):
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    file = GgufFile(path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CorruptCheckpoint, match="became shorter"):
        file.get(file.names()[-1])


def test_unknown_names_are_named(tmp_path, good):
    (tmp_path / "m.gguf").write_bytes(good)
    with pytest.raises(TensorMismatch, match="'nobody'"):
        GgufFile(tmp_path / "m.gguf").get("nobody")


def test_results_are_ours_to_write(tmp_path, good):
    (tmp_path / "m.gguf").write_bytes(good)
    file = GgufFile(tmp_path / "m.gguf")
    file.get("output_norm.weight").zero_()
    assert torch.count_nonzero(file.get("output_norm.weight"))

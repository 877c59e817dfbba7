"""Sessions: pages of a prefix in a file, and back in the cache of a fresh engine, bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import CapacityError, UsageError
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.session_file import (
    DIGEST_BYTES,
    SESSION_FILE_MAGIC,
    read_session,
    write_session,
)
from modelmill.runtime.session_pages import (
    SessionPages,
    export_session,
    import_session,
    session_compatibility_layout,
)
from tests.runtime import tiny
from tests.runtime.sessions import MANY, answer, save

PROMPT = tiny.prompts(1, 40, 40)[0]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"page_size": 16}])
def test_a_fresh_engine_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    core = tiny.make_engine(**options)
    answer(core, PROMPT)
    expected, cached = answer(core, PROMPT)
    assert cached >= 32
    session = save(core, PROMPT, tmp_path / "s")
    assert len(session.tokens) == 40 // core.page_size * core.page_size
    fresh = tiny.make_engine(**options)
    loaded = read_session(tmp_path / "s", session_compatibility_layout(fresh))
    assert import_session(fresh, loaded, "") == len(session.tokens)
    assert answer(fresh, PROMPT) == (expected, cached)
    assert answer(core, PROMPT) == (expected, cached)
    tiny.assert_idle(fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_restored_session_belongs_to_its_salt(tmp_path: Path) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    session = save(core, PROMPT, tmp_path / "s")
    with pytest.raises(UsageError, match="no full page of 8 tokens in the prefix cache"):
        export_session(core, PROMPT, "other", MANY)
    fresh = tiny.make_engine()
    import_session(fresh, session, "other")
    assert answer(fresh, PROMPT)[1] == 0


def test_restoring_twice_takes_no_more_pages(tmp_path: Path) -> None:
    core = tiny.make_engine(pages=16)
    answer(core, PROMPT)
    session = save(core, PROMPT, tmp_path / "s")
    fresh = tiny.make_engine(pages=16)
    for _ in range(3):
        assert import_session(fresh, session, "") == 40
        assert (fresh.stats().cached_pages, fresh.stats().free_pages) == (5, 16)


def test_a_session_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    session = save(core, PROMPT, tmp_path / "s")
    small = tiny.make_engine(pages=4)
    with pytest.raises(CapacityError, match="needs 5 pages of the KV cache, and 4 are free"):
        import_session(small, session, "")
    assert small.stats().cached_pages == 0
    with pytest.raises(CapacityError, match="--session-bytes leaves 10 bytes"):
        export_session(core, PROMPT, "", 10)


LONGER = PROMPT + tiny.prompts(1, 20, 20, seed=7)[0]


def assert_goes_on(core: EngineCore, make: Callable[[], EngineCore], path: Path) -> SessionPages:
    """The next turn of a restored conversation is that of the engine that saved it."""
    answer(core, PROMPT)
    session = save(core, PROMPT, path)
    fresh = make()
    loaded = read_session(path, session_compatibility_layout(fresh))
    assert loaded.state is not None
    assert loaded.nbytes == session.nbytes
    assert import_session(fresh, loaded, "") == len(session.tokens)
    expected = answer(core, LONGER)
    assert expected[1] == len(session.tokens)
    assert answer(fresh, LONGER) == expected
    assert fresh.stats().restored_states == 1
    tiny.assert_idle(fresh)
    return session


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"page_size": 16}])
@pytest.mark.parametrize("recurrent", [(0, 2), (0, 1, 2)])
def test_a_recurrent_state_goes_on_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], recurrent: tuple[int, ...]
) -> None:
    def make() -> EngineCore:
        return tiny.make_engine(tiny.hybrid(recurrent=recurrent), **options)

    session = assert_goes_on(make(), make, tmp_path / "s")
    # the latest state in front of the prompt's last token
    size = options.get("page_size", 8)
    assert len(session.tokens) == (len(PROMPT) - 1) // size * size


def test_restoring_a_state_twice_takes_no_more_slots(tmp_path: Path) -> None:
    core = tiny.make_engine(tiny.hybrid())
    session = assert_goes_on(core, lambda: tiny.make_engine(tiny.hybrid()), tmp_path / "s")
    fresh = tiny.make_engine(tiny.hybrid())
    for _ in range(3):
        import_session(fresh, session, "")
        assert fresh.scheduler.states is not None
        assert fresh.scheduler.states.num_cached == 1


def test_a_state_without_a_slot_is_refused(tmp_path: Path) -> None:
    core = tiny.make_engine(tiny.hybrid())
    answer(core, PROMPT)
    session = save(core, PROMPT, tmp_path / "s")
    fresh = tiny.make_engine(tiny.hybrid())
    states = fresh.scheduler.states
    assert states is not None
    for number in range(states.count):
        slot = states.insert_snapshot_slot(b"%d" % number)
        assert slot is not None
        states.queue_state_copy(slot, 0)  # to be copied before the next step
    with pytest.raises(CapacityError, match="a slot for its recurrent state, and none is free"):
        import_session(fresh, session, "")
    states.drop_state_copies_into(0)
    assert import_session(fresh, session, "") == len(session.tokens)


def test_a_file_of_another_state_is_refused(tmp_path: Path) -> None:
    core = tiny.make_engine(tiny.hybrid())
    answer(core, PROMPT)
    save(core, PROMPT, tmp_path / "s")
    layout = session_compatibility_layout(core)
    shape, _ = layout["states"][0]
    for key, value, what in (
        ("states", [[shape, "bfloat16"], *layout["states"][1:]], "dtype of the recurrent state"),
        ("state_bytes", 64, "layout of the recurrent state"),
    ):
        with pytest.raises(UsageError, match=f"saved with another {what}; it cannot be restored"):
            read_session(tmp_path / "s", {**layout, key: value})
    data = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(data[:-40])
    with pytest.raises(UsageError, match="is damaged"):
        read_session(tmp_path / "s", layout)


def test_another_engine_is_refused(tmp_path: Path) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    save(core, PROMPT, tmp_path / "s")
    layout = session_compatibility_layout(core)
    for key, value, what in (
        ("engine", "other", "engine"),
        ("page_size", 16, "page size"),
        ("tensors", layout["tensors"][:-1], "KV dtype"),
    ):
        with pytest.raises(UsageError, match=f"saved with another {what}; it cannot be restored"):
            read_session(tmp_path / "s", {**layout, key: value})


def test_a_file_that_is_cut_or_changed_is_refused(tmp_path: Path) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    path, layout = tmp_path / "s", session_compatibility_layout(core)
    save(core, PROMPT, path)
    data = path.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        position = draw.randrange(len(data))
        flipped = bytearray(data)
        flipped[position] ^= 1 << draw.randrange(8)
        for damaged in (bytes(flipped), data[:position], data[position:], data + b"\0"):
            path.write_bytes(damaged)
            if damaged == data:
                continue
            with pytest.raises(UsageError, match=r"is not a saved session|is damaged"):
                read_session(path, layout)


@pytest.mark.parametrize(
    "change",
    [
        *({"tokens": [1]}, {"tokens": "x"}, {"pages": 0}, {"pages": 10**9}, {"tokens": [-1] * 40}),
        *({"images": 1}, {"images": [[0, 4]]}, {"images": [[40, 4, "x"]]}),
        *({"images": [[0, 0, "x"]]}, {"images": [[0, True, "x"]]}, {"images": [[0, 4, None]]}),
        # what no key of the prefix cache can be made of
        *({"tokens": [1 << 31] * 40}, {"images": [[0, 4, "\ud800"]]}),
    ],
)
def test_a_forged_header_with_the_right_digest_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    path, layout = tmp_path / "s", session_compatibility_layout(core)
    session = save(core, PROMPT, path)
    body = b"".join(each.tobytes() for each in session.data)
    header = json.dumps({**layout, "tokens": list(session.tokens), "pages": 5, **change}).encode()
    content = SESSION_FILE_MAGIC + struct.pack("<Q", len(header)) + header + body
    path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(UsageError, match="contradicts itself"):
        read_session(path, layout)
    for content in (
        SESSION_FILE_MAGIC + struct.pack("<Q", 1 << 62) + header + body,
        SESSION_FILE_MAGIC,
    ):
        path.write_bytes(content + hashlib.sha256(content).digest())
        with pytest.raises(UsageError, match="contradicts itself"):
            read_session(path, layout)


def test_a_number_of_pages_is_no_boolean(tmp_path: Path) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    path, layout = tmp_path / "s", session_compatibility_layout(core)
    session = export_session(core, PROMPT[:8], "", MANY)
    write_session(path, layout, session)
    content = path.read_bytes()[:-DIGEST_BYTES].replace(b'"pages": 1}', b'"pages":true}')
    size = len(SESSION_FILE_MAGIC)
    (length,) = struct.unpack("<Q", content[size : size + 8])
    content = SESSION_FILE_MAGIC + struct.pack("<Q", length + 2) + content[size + 8 :]
    path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(UsageError, match="contradicts itself"):
        read_session(path, layout)


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: Any) -> None:
    core = tiny.make_engine()
    answer(core, PROMPT)
    session = export_session(core, PROMPT, "", MANY)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_session(tmp_path / "s", session_compatibility_layout(core), session)
    assert list(tmp_path.iterdir()) == []

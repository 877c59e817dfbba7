"""Sessions of engines on several ranks: saved by N, restored by N bit for bit, by no other number.

The ranks are processes on the CPU, connected by gloo.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import RunConfig
from modelmill.core.errors import CapacityError, RankError, UsageError
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.session_file import DIGEST_BYTES, SESSION_FILE_MAGIC, read_session
from modelmill.runtime.session_pages import (
    export_session,
    import_session,
    session_compatibility_layout,
)
from tests.runtime import tiny
from tests.runtime.sessions import MANY, answer, save

pytestmark = pytest.mark.usefixtures("ended_ranks")
PROMPT = tiny.prompts(1, 44, 44, vocab=90)[0]
LONGER = PROMPT + tiny.prompts(1, 20, 20, seed=7, vocab=90)[0]


@contextmanager
def opened(engine: Path, tp: int, **options: Any) -> Iterator[EngineCore]:
    """An engine core on so many ranks, which end behind the block."""
    defaults = {"kv_cache_bytes": 1 << 21, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    config = RunConfig(device="cpu", tp=tp, threads=1, page_size=8, **{**defaults, **options})
    core = EngineCore.open(engine, config)
    try:
        yield core
    finally:
        core.close()


@pytest.fixture(scope="module")
def pair(engines: Callable[[str], Path]) -> Iterator[EngineCore]:
    """A llama on two ranks, which several tests use one after the other."""
    with opened(engines("llama"), 2) as core:
        yield core


@pytest.mark.parametrize(
    ("name", "tp", "options"),
    [
        ("llama", 2, {}),
        ("llama", 2, {"kv_cache_dtype": "int8"}),
        ("gpt2", 3, {}),  # 4 heads: the ranks keep pages of different sizes
        ("qwen3_5_text", 2, {}),  # recurrent state
        ("gemma2", 2, {}),  # page groups
    ],
)
def test_as_many_ranks_go_on_bit_for_bit(
    engines: Callable[[str], Path], tmp_path: Path, name: str, tp: int, options: dict[str, Any]
) -> None:
    with opened(engines(name), tp, **options) as core:
        answer(core, PROMPT)
        session = save(core, PROMPT, tmp_path / "s")
        assert len(session.data) == tp
        expected = answer(core, LONGER)
    assert expected[1] == len(session.tokens) >= 32
    with opened(engines(name), tp, **options) as fresh:
        loaded = read_session(tmp_path / "s", session_compatibility_layout(fresh))
        assert import_session(fresh, loaded, "") == len(session.tokens)
        again = export_session(fresh, PROMPT, "", MANY)
        assert [each.tobytes() for each in again.data] == [each.tobytes() for each in session.data]
        assert answer(fresh, LONGER) == expected
        tiny.assert_idle(fresh)


def test_pages_travel_in_parts(
    pair: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelmill.runtime.session_rank_transfer._CHUNK_BYTES", 1)
    answer(pair, PROMPT)
    in_parts = save(pair, PROMPT, tmp_path / "s")
    monkeypatch.undo()
    whole = export_session(pair, PROMPT, "", MANY)
    for one, other in zip(in_parts.data, whole.data, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("name", "saved_by", "restored_by"), [("llama", 2, 1), ("gpt2", 1, 2), ("gpt2", 2, 3)]
)
def test_another_number_of_ranks_is_one_line(
    engines: Callable[[str], Path],
    pair: EngineCore,
    tmp_path: Path,
    name: str,
    saved_by: int,
    restored_by: int,
) -> None:
    is_pair = (name, saved_by) == ("llama", 2)
    with nullcontext(pair) if is_pair else opened(engines(name), saved_by) as core:
        answer(core, PROMPT)
        save(core, PROMPT, tmp_path / "s")
    message = (
        rf"^the session was saved with --tp {saved_by} and the engine runs with "
        rf"--tp {restored_by}; serve it with --tp {saved_by} to restore it$"
    )
    with opened(engines(name), restored_by) as other:
        layout = session_compatibility_layout(other)
    with pytest.raises(UsageError, match=message):
        read_session(tmp_path / "s", layout)


def test_cut_and_forged_files_are_one_line(pair: EngineCore, tmp_path: Path) -> None:
    path = tmp_path / "s"
    answer(pair, PROMPT)
    save(pair, PROMPT, path)
    layout = session_compatibility_layout(pair)
    data = path.read_bytes()
    for part in (data[:-1], data[: len(data) // 2], data[: len(SESSION_FILE_MAGIC) + 9]):
        path.write_bytes(part)
        with pytest.raises(UsageError, match="is damaged"):
            read_session(path, layout)
    start = len(SESSION_FILE_MAGIC) + 8
    (length,) = struct.unpack("<Q", data[len(SESSION_FILE_MAGIC) : start])
    header, body = json.loads(data[start : start + length]), data[start + length : -DIGEST_BYTES]
    wide, narrow = header["rank_page_bytes"][0] + 8, header["rank_page_bytes"][0] - 8
    forged: list[tuple[dict[str, Any], str]] = [
        ({"rank_page_bytes": "x"}, "contradicts itself"),
        ({"rank_page_bytes": []}, "contradicts itself"),
        ({"rank_page_bytes": [wide, narrow]}, "another division of the KV heads among ranks"),
        ({"rank_page_bytes": [10**9]}, "saved with --tp 1"),
        ({"pages": header["pages"] - 1}, "contradicts itself"),
        ({"tokens": header["tokens"][:-8]}, "contradicts itself"),
    ]
    for change, message in forged:
        text = json.dumps({**header, **change}).encode()
        content = SESSION_FILE_MAGIC + struct.pack("<Q", len(text)) + text + body
        path.write_bytes(content + hashlib.sha256(content).digest())
        with pytest.raises(UsageError, match=message):
            read_session(path, layout)


def test_what_does_not_fit_is_refused_and_the_ranks_go_on(
    engines: Callable[[str], Path], pair: EngineCore, tmp_path: Path
) -> None:
    answer(pair, PROMPT)
    session = save(pair, PROMPT, tmp_path / "s")
    with pytest.raises(CapacityError, match="--session-bytes leaves 10 bytes"):
        export_session(pair, PROMPT, "", 10)
    page_bytes = sum(each.shape[1] for each in session.data) // 2
    with opened(engines("llama"), 2, kv_cache_bytes=5 * page_bytes, max_model_len=32) as small:
        with pytest.raises(CapacityError, match="needs 5 pages of the KV cache, and 4 are free"):
            import_session(small, session, "")
        short, cached = answer(small, PROMPT[:16])
    assert cached == 0
    assert answer(pair, PROMPT[:16])[0] == short


def test_a_killed_rank_is_one_line(engines: Callable[[str], Path]) -> None:
    with opened(engines("llama"), 2) as core:
        answer(core, PROMPT)
        workers: Any = core.model_runner.tp_workers
        workers._processes[0].kill()
        with pytest.raises(RankError, match=r"^rank 1 of 2 was killed by signal 9"):
            export_session(core, PROMPT, "", MANY)

"""Records of running servers: of which process, and what becomes of those that ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from modelmill.core.server_records import list_running_and_prune_stale, records_dir, register_server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))


def write(name: str, **changed: object) -> None:
    record = {"url": "http://127.0.0.1:1", "models": ["m"], "pid": os.getpid(), "started": 0.0}
    records_dir().mkdir(exist_ok=True)
    (records_dir() / f"{name}.json").write_text(json.dumps(record | changed))


def test_a_server_is_listed_while_it_runs() -> None:
    assert list_running_and_prune_stale() == []
    with register_server("http://127.0.0.1:8000", ["a", "b"]):
        [server] = list_running_and_prune_stale()
        assert (server.url, server.models, server.pid) == (
            "http://127.0.0.1:8000",
            ("a", "b"),
            os.getpid(),
        )
        assert server.memory_bytes > 1 << 20
    assert list_running_and_prune_stale() == []
    assert list(records_dir().iterdir()) == []


def test_records_of_ended_and_of_other_processes_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    write("ended", pid=ended.pid, started=psutil.Process().create_time())
    write("other", started=1.0)  # this process has the id, and another start
    (records_dir() / "broken.json").write_text("{")
    write("incomplete", pid="x")
    assert list_running_and_prune_stale() == []
    assert list(records_dir().iterdir()) == []


def test_serving_goes_on_where_no_record_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "file"))
    with register_server("http://127.0.0.1:8000", ["a"]):
        assert list_running_and_prune_stale() == []

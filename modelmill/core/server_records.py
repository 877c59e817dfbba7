"""Records of this user's running servers, one small file each, for ``ps``, ``stop`` and ``launch``.

A record names its process by id and start time, so that another process that got the id later is
never taken for the server. Records of processes that ended are removed when they are read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from modelmill.core.env import cache_dir

START_TIME_TOLERANCE_SECONDS = 1.0
"""Seconds by which two readings of a process's start time may differ."""


@dataclass(frozen=True)
class ServerRecord:
    """A running server.

    Attributes:
        url: Its address.
        models: Names of the served engines.
        pid: Of the process that listens.
        started: Start of that process, in seconds since the epoch.
    """

    url: str
    models: tuple[str, ...]
    pid: int
    started: float

    @property
    def client_url(self) -> str:
        """The address for a client on this machine: a server may listen on every interface."""
        return self.url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")

    def live_process(self) -> psutil.Process | None:
        """Return the process if it is still the one that wrote the record."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < START_TIME_TOLERANCE_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the server and its workers; shared pages count once a process."""
        process = self.live_process()
        if process is None:
            return 0
        total = 0
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
        return total


def records_dir() -> Path:
    """Return the folder of the records."""
    return cache_dir() / "servers"


@contextlib.contextmanager
def register_server(url: str, models: Sequence[str]) -> Iterator[None]:
    """Keep a record of this process's server.

    A folder that cannot be written is no reason not to serve: ``ps`` then does not list it.
    """
    pid = os.getpid()
    record = ServerRecord(url, tuple(models), pid, psutil.Process(pid).create_time())
    file = records_dir() / f"{pid}.json"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
        partial.replace(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def list_running_and_prune_stale() -> list[ServerRecord]:
    """Return the servers that run, oldest first; remove records of those that do not."""
    found = []
    for file in sorted(records_dir().glob("*.json")):
        record = _read_record(file)
        if record is not None and record.live_process() is not None:
            found.append(record)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda record: record.started)


def _read_record(file: Path) -> ServerRecord | None:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        url, models, pid, started = (raw[name] for name in ("url", "models", "pid", "started"))
        return ServerRecord(str(url), tuple(map(str, models)), int(pid), float(started))
    except (OSError, ValueError, KeyError, TypeError):
        return None

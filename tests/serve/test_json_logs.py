"""Logs that are not read, or read late."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from modelmill.cli.output import tolerate_closed_output
from modelmill.serve import json_logs
from tests.wait import TIMEOUT_SECONDS

PIPE_BYTES = 1 << 16
"""More than a pipe holds by default on the supported systems, at most."""
LOGGER = logging.getLogger("modelmill.serve")


class UnreadLog:
    """A pipe whose end is read by hand, in place of stderr."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self._stream = io.TextIOWrapper(open(writer, "wb"), line_buffering=True)  # noqa: SIM115  # closed below

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Send what is logged to the pipe."""
        with mock.patch("sys.stderr", self._stream), json_logs.log_to_stderr("warning"):
            yield

    def read_bytes(self) -> bytes:
        """Read once, at most what one line of the tests is long."""
        os.set_blocking(self.reader, False)
        return os.read(self.reader, 2 * PIPE_BYTES)

    def read_lines(self) -> list[dict[str, object]]:
        """What lies in the pipe; the last line must be complete."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := self.read_bytes():
                data += part
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]

    def close(self) -> None:
        """Close the reader's end first: a writer that waits ends with an error."""
        os.close(self.reader)
        self._stream.close()


@pytest.fixture
def unread_log() -> Iterator[UnreadLog]:
    log = UnreadLog()
    yield log
    log.close()


def log_lines(count: int, text: str, first: int = 0) -> None:
    """Log so many lines, as the event loop does; fail if that waits for the reader."""

    def log() -> None:
        for number in range(first, first + count):
            LOGGER.warning("event", extra={"data": {"number": number, "text": text}})

    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive(), "the log waits for its reader"


def numbers(lines: list[dict[str, object]]) -> list[object]:
    return [line["number"] for line in lines if line["event"] == "event"]


def test_a_log_that_is_not_read_delays_nothing(unread_log: UnreadLog) -> None:
    """What does not fit into the pipe is dropped and counted; the log goes on when it is read."""
    with unread_log.writing():
        log_lines(1000, "x" * 200)
        before = unread_log.read_lines()
        log_lines(3, "", first=1000)
        after = unread_log.read_lines()
    assert numbers(before) == list(range(len(before)))
    assert len(before) > 10
    # the line that waited, how many are missing, and all that came later
    assert numbers(after) == [len(before), 1000, 1001, 1002]
    (missing,) = [line for line in after if line["event"] == "log lines dropped"]
    assert missing["lines"] == 1000 - len(before) - 1
    assert missing["level"] == "warning"


def test_a_line_longer_than_a_pipe_takes_at_once_stays_whole(unread_log: UnreadLog) -> None:
    """A part of it lies in the full pipe; the rest follows when that was read."""
    with unread_log.writing():
        log_lines(2, "x" * 2 * PIPE_BYTES)
        first = unread_log.read_bytes()
        log_lines(1, "", first=2)
        second = unread_log.read_bytes()
        log_lines(1, "", first=3)
        rest = unread_log.read_bytes()
    lines = [json.loads(line) for line in (first + second + rest).splitlines()]
    assert numbers(lines) == [0, 3]
    assert lines[0]["text"] == "x" * 2 * PIPE_BYTES
    assert lines[1]["lines"] == 2


def test_a_stream_without_a_descriptor(capsys: pytest.CaptureFixture[str]) -> None:
    with json_logs.log_to_stderr("warning"):
        log_lines(1000, "x" * 200)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert numbers(lines) == list(range(1000))


def test_a_reader_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with tolerate_closed_output(), json_logs.log_to_stderr("warning"):
            log_lines(3, "")

"""Takes the place of llama.cpp's ServerProcess.start: a running ``modelmill serve``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tools.conformance.server import serve_engine
from tools.peer_server_tests.server_options import (
    missing_feature,
    serve_flags,
    served_names,
    with_defaults,
)

NOT_APPLICABLE = "not applicable: "


class RunningServer:
    """One running server; a test with other options, or that needs a fresh one, starts another.

    Attributes:
        folder: for its files.
        port: where it listens.
        is_reused: whether it has answered requests of another test.
        file: of tests that runs now.
        more_names: of the model that this file asks for.
    """

    def __init__(self, engine: Path, folder: Path) -> None:
        """Start nothing yet.

        Args:
            engine: to serve.
            folder: for its files.
        """
        self._engine, self.folder = engine, folder
        self._stack = contextlib.ExitStack()
        self._key: tuple[object, ...] | None = None
        self.port = 0
        self.is_reused = False
        self.file: Path | None = None
        self.more_names: tuple[str, ...] = ()

    def start(self, flags: tuple[str, ...], names: tuple[str, ...], template: str) -> None:
        """Start it, unless it runs with these options."""
        names += self.more_names
        key = (flags, names, template)
        self.is_reused = key == self._key
        if self.is_reused:
            return
        self.close()
        log = self.folder / "server.log"
        url = self._stack.enter_context(serve_engine(self._engine, log, flags, names=names))
        self.port = urlsplit(url).port or 0
        self._key = key

    def close(self) -> None:
        """End it."""
        self._key = None
        self._stack.close()


def replace_server_process(utils: Any, running: RunningServer, answers: list[Any]) -> None:
    """Let llama.cpp's ServerProcess use the running server.

    Args:
        utils: llama.cpp's module ``utils``.
        running: the server.
        answers: receives method, path, status and body of each whole answer.
    """
    process = utils.ServerProcess
    make_request, make_stream_request = process.make_request, process.make_stream_request

    def start(self: Any, **_: Any) -> None:
        if feature := missing_feature(self):
            pytest.skip(NOT_APPLICABLE + feature)
        flags = serve_flags(self, running.folder)
        running.start(flags, served_names(self), Path(flags[-1]).read_text("utf-8"))
        self.server_port = running.port
        self.ready = True

    def request(self: Any, method: str, path: str, data: Any = None, *args: Any, **kw: Any) -> Any:
        data = with_defaults(self, path, data)
        response = make_request(self, method, path, data, *args, **kw)
        response.headers = utils.requests.structures.CaseInsensitiveDict(response.headers)
        answers.append((method, path, response.status_code, response.body))
        return response

    def stream(self: Any, method: str, path: str, data: Any = None, *args: Any, **kw: Any) -> Any:
        data = with_defaults(self, path, data)
        try:
            yield from make_stream_request(self, method, path, data, *args, **kw)
        except utils.ServerError as error:
            answers.append((method, path, error.code, error.body))
            raise

    def stop(_: Any) -> None:
        """Leave it running, for the next test."""

    utils.TMP_DIR = str(running.folder)
    process.start, process.stop = start, stop
    process.make_request, process.make_stream_request = request, stream

"""``chat --url`` where there is no API at the other end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest


class Page(BaseHTTPRequestHandler):
    """A page for people, whatever is asked."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Welcome</html>")

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""


@pytest.fixture
def page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "words", [("chat", "--url"), ("bench", "serve", "--url")], ids=["chat", "bench"]
)
def test_a_page_that_is_no_api(cli: Any, page: str, words: tuple[str, ...]) -> None:
    code, out, err = cli(*words, page)
    assert (code, out) == (1, "")
    assert "/v1/models does not return JSON" in err
    assert err.count("\n") == 1

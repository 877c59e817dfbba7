"""``chat --url`` where there is no API at the other end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from modelmill.cli.chat import ChatSession
from modelmill.cli.remote_chat import RemoteChat
from modelmill.core.types import SamplingParams
from modelmill.eval.openai_client import OpenAIClient


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


class Models(Page):
    """A server that lists three models, one of them for segmentation."""

    def do_GET(self) -> None:
        models = [{"id": "small"}, {"id": "large", "kind": None}, {"id": "sam", "kind": "segment"}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": models}).encode())


def test_models_of_the_server_are_listed_and_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = OpenAIClient.from_url(f"http://127.0.0.1:{server.server_port}")
        remote = RemoteChat(client)
        session = ChatSession(remote, SamplingParams(), None)
        assert remote.model == "small"
        for line in ("/model", "/model large", "/model", "/model sam"):
            assert session.handle_line(line)
        remote.close()
        server.shutdown()
    assert remote.model == "large"
    assert capsys.readouterr().out.splitlines() == [
        "* small", "  large", "(large answers from now on)", "  small", "* large",
        "the server has no sam; it has small, large",
    ]  # fmt: skip

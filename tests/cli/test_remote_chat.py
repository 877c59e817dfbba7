"""``chat --url`` where there is no API at the other end."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from modelmill.cli.chat import ChatSession
from modelmill.cli.chat_model import ChatSettings
from modelmill.cli.remote_chat import RemoteChatModel
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


class Suggesting(Page):
    """A server whose models suggest sampling; it keeps what it is sent, and counts no tokens."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        values = {"temperature": 0.6, "top_k": 40}
        models = [
            {"id": name, "suggested_sampling": {"values": values, "source": source}}
            for name, source in (("ours", "modelmill"), ("theirs", "checkpoint"))
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()
        for word in ("a ", "b "):
            event = {"choices": [{"delta": {"content": word}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def suggesting() -> Iterator[RemoteChatModel]:
    Suggesting.bodies.clear()
    with HTTPServer(("127.0.0.1", 0), Suggesting) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        remote = RemoteChatModel(OpenAIClient.from_url(f"http://127.0.0.1:{server.server_port}"))
        yield remote
        remote.close()
        server.shutdown()


def test_people_get_the_suggested_sampling_as_a_group(suggesting: RemoteChatModel) -> None:
    """As on the page: not beside one that is set, and not where the checkpoint has its own."""
    fields = ("temperature", "top_k", "top_p")
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(max_tokens=3)):
        assert ChatSession(suggesting, params, None, silent=True).handle_line("Hello")
    suggesting.choose_model("theirs")
    assert ChatSession(suggesting, SamplingParams(), None, silent=True).handle_line("Hello")
    assert [
        {name: body[name] for name in fields if name in body} for body in Suggesting.bodies
    ] == [{"temperature": 0.6, "top_k": 40}, {"top_k": 5}, {"temperature": 0.6, "top_k": 40}, {}]


def test_tokens_that_were_not_counted_are_not_told_as_none(
    suggesting: RemoteChatModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that was stopped: the server's count would have come at its end."""
    assert ChatSession(suggesting, SamplingParams(), None).handle_line("Hello")
    out, err = capsys.readouterr()
    assert out.strip() == "a b"
    assert re.fullmatch(r"modelmill: first token after [\d.]+ s, [\d.]+ s in all\n", err)


class Holding(Page):
    """A server that sends events at once, and counts the tokens."""

    deltas: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        events = [{"choices": [{"delta": delta}]} for delta in self.deltas]
        usage = {"prompt_tokens": 7, "completion_tokens": 300}
        for event in (*events, {"choices": [], "usage": usage}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.mark.parametrize(
    ("deltas", "speed"),
    [
        ([{"role": "assistant"}, {"content": "all of the text"}], ""),
        ([{"content": "nearly all of the text"}, {"content": "."}], ""),
        ([{"reasoning_content": "Well"}, {"content": "some text"}], "first token after .*tokens/s"),
    ],
)
def test_text_that_comes_at_once_has_no_rate(
    deltas: list[dict[str, str]], speed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be a rate of the end of the connection; thinking counts as the first token."""
    Holding.deltas = deltas
    with HTTPServer(("127.0.0.1", 0), Holding) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = OpenAIClient.from_url(f"http://127.0.0.1:{server.server_port}")
        remote = RemoteChatModel(client, "m")
        assert ChatSession(remote, SamplingParams(), None).handle_line("Hello")
        remote.close()
        server.shutdown()
    line = r"modelmill: 7 prompt \+ 300 answer tokens in [\d.]+ s"
    assert re.fullmatch(f"{line}: {speed}\n" if speed else f"{line}\n", capsys.readouterr().err)


def test_an_answer_that_is_stopped_leaves_no_task(suggesting: RemoteChatModel) -> None:
    """At exit asyncio would report one that is pending."""
    answer: Any = suggesting.stream(
        [{"role": "user", "content": "Hello"}], SamplingParams(), ChatSettings()
    )
    assert next(answer).pieces == ["a "]
    answer.close()
    gc.collect()
    assert asyncio.all_tasks(suggesting._loop) == set()


def test_models_of_the_server_are_listed_and_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = OpenAIClient.from_url(f"http://127.0.0.1:{server.server_port}")
        remote = RemoteChatModel(client)
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

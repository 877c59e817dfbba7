"""Targets that are whole URLs, and HEAD on every path: as RFC 9110 and 9112 have them."""

from __future__ import annotations

import pytest

from modelmill.serve.request_target import normalize_request, sent_method
from tests.serve.server_process import ServerProcess, read_all
from tests.serve.service_thread import ServiceThread

PATHS = (
    "/", "/health", "/ping", "/version", "/metrics", "/props", "/v1/models", "/models",
    "/v1/models/stories", "/api/tags", "/api/ps", "/api/version", "/openapi.json",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_the_body(running: ServiceThread, path: str) -> None:
    response = running.get(path)
    head = running.run(running.client.call("HEAD", path))
    assert (head.status, head.body) == (response.status, b"") == (200, b"")
    assert head.headers.get("content-length") == response.headers.get("content-length")


def test_head_of_a_path_that_takes_a_body(running: ServiceThread) -> None:
    for path, status in (("/v1/completions", 405), ("/v1/models/none", 404), ("/none", 404)):
        head = running.run(running.client.call("HEAD", path))
        assert (head.status, head.body) == (status, b"")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://localhost/v1/models", "/v1/models"),
        ("HTTP://127.0.0.1:8000/models", "/v1/models"),
        ("https://localhost/v1/models/a%20b", "/v1/models/a b"),
        ("http://localhost", "/"),
        ("/v1/models/http://localhost/x", "/v1/models/http://localhost/x"),
        ("http:///v1/models", "http:///v1/models"),
        ("ftp://localhost/v1/models", "ftp://localhost/v1/models"),
    ],
)
def test_the_path_of_a_target(target: str, path: str) -> None:
    scope = normalize_request(
        {"path": target, "raw_path": target.encode(), "method": "GET", "headers": []}
    )
    assert scope["path"] == path
    assert sent_method(scope) == "GET"


def test_both_on_a_socket(server: ServerProcess) -> None:
    for head in (b"GET http://localhost/v1/models?beta=true", b"HEAD /v1/models", b"HEAD /ping"):
        with server.connect() as sock:
            sock.sendall(head + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            received = read_all(sock)
        assert received.startswith(b"HTTP/1.1 200"), received
        assert received.endswith(b"\r\n\r\n") == head.startswith(b"HEAD")

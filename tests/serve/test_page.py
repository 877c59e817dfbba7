"""The page at /: files of our own, a strict policy, open where the API has a key."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from modelmill.serve.app import make_app
from modelmill.serve.routes.page import FILES, FOLDER, PATHS
from modelmill.serve.service import Limits, Service
from tests.serve.asgi import Client, Response
from tests.serve.running import Running

HOSTS = ("http://www.w3.org/2000/svg",)  # a name, not an address


def call(running: Running, path: str, method: str = "GET", limits: Limits | None = None, **headers: str) -> Response:
    service = Service(running.service.engines, limits or Limits(), metrics=running.service.metrics)
    try:
        return asyncio.run(Client(make_app(service)).call(method, path, headers=headers))
    finally:
        service.close()


@pytest.mark.parametrize("path", FILES)
def test_each_file_is_sent_with_the_policy_and_without_a_key(running: Running, path: str) -> None:
    response = call(running, path, limits=Limits(keys=("secret",)))
    assert response.status == 200
    assert response.body == FILES[path].read_bytes()
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    kind = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    assert response.headers["content-type"].startswith(kind[FILES[path].suffix])
    again = call(running, path, **{"if-none-match": response.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/", "/page", "/page/index.html", "/page//app.js", "/page/%2e%2e/app.py", "//",
     "/index.html"],
)  # fmt: skip
def test_nothing_else_is_sent(running: Running, path: str) -> None:
    assert call(running, path).status == 404
    assert call(running, path, limits=Limits(keys=("secret",))).status == 401


def test_it_is_not_part_of_the_api(running: Running) -> None:
    paths = running.get("/openapi.json").json["paths"]
    assert not any(path == "/" or path.startswith("/page") for path in paths)
    assert call(running, "/", "POST").status == 405
    head = call(running, "/", "HEAD")
    assert head.status == 200


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_files_need_nothing_from_elsewhere(file: Path) -> None:
    """No other hosts, no scripts or styles in the page, no HTML made of text."""
    text = file.read_text("utf-8")
    for url in re.findall(r"https?://[\w.-]+[\w/.-]*", text):
        assert url in HOSTS, url
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b", text)
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        assert set(re.findall(r'(?:src|href)="(/[^"]*)"', text)) <= set(FILES)
    if file.suffix == ".js":
        assert {f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)} <= set(FILES)
    assert file.stat().st_size < 32 << 10


def test_all_of_it_is_light_and_packed() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 80 << 10
    assert {file.name for file in FOLDER.iterdir()} == {file.name for file in FILES.values()}
    assert b"/" in PATHS
    project = tomllib.loads((FOLDER.parent.parent.parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["modelmill.serve"] == ["page/*"]

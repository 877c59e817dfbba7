"""The page at /: files of our own, a strict policy, open where the API has a key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from modelmill.serve.app import make_app
from modelmill.serve.routes.page import PAGE_DIR, PAGE_FILES, PAGE_PATHS
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client, Response
from tests.serve.service_thread import ServiceThread

HOSTS = ("http://www.w3.org/2000/svg",)  # a name, not an address
VENDOR_DIR = PAGE_DIR / "vendor"
OWN_FILES = sorted(file for file in PAGE_DIR.iterdir() if file.is_file())
VENDOR_FILES = sorted(file for file in VENDOR_DIR.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def client(running: ServiceThread) -> Iterator[Client]:
    """Calls of an application without a key."""
    yield from client_of(running, ServiceLimits())


@pytest.fixture(scope="module")
def client_without_key(running: ServiceThread) -> Iterator[Client]:
    """Calls that bring no key, of an application that has one."""
    yield from client_of(running, ServiceLimits(api_keys=("secret",)))


def client_of(running: ServiceThread, limits: ServiceLimits) -> Iterator[Client]:
    """An application takes a fifth of a second to make, so the tests share two of them."""
    service = Service(running.service.engines, limits, metrics=running.service.metrics)
    yield Client(make_app(service))
    service.close()


def call(client: Client, path: str, method: str = "GET", **headers: str) -> Response:
    return asyncio.run(client.call(method, path, headers=headers))


@pytest.mark.parametrize("path", PAGE_FILES)
def test_each_file_is_sent_with_the_policy_and_without_a_key(
    client: Client, client_without_key: Client, path: str
) -> None:
    response = call(client_without_key, path)
    assert response.status == 200
    assert response.body == PAGE_FILES[path].read_bytes()
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    content_type = {
        ".js": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
        ".html": "text/html",
        ".txt": "text/plain",
        ".woff2": "font/woff2",
    }
    assert response.headers["content-type"].startswith(content_type[PAGE_FILES[path].suffix])
    again = call(client, path, **{"if-none-match": response.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/", "/page", "/page/index.html", "/page//app.js",
    "/page/%2e%2e/app.py", "//",
     "/index.html"],
)  # fmt: skip
def test_nothing_else_is_sent(client: Client, client_without_key: Client, path: str) -> None:
    assert call(client, path).status == 404
    assert call(client_without_key, path).status == 401


def test_it_is_not_part_of_the_api(running: ServiceThread, client: Client) -> None:
    paths = running.get("/openapi.json").json["paths"]
    assert not any(path == "/" or path.startswith("/page") for path in paths)
    assert call(client, "/", "POST").status == 405
    head = call(client, "/", "HEAD")
    assert head.status == 200


@pytest.mark.parametrize("file", OWN_FILES, ids=lambda file: file.name)
def test_files_need_nothing_from_elsewhere(file: Path) -> None:
    """No other hosts, no scripts or styles in the page, no HTML made of text."""
    text = file.read_text("utf-8")
    for url in re.findall(r"https?://[\w.-]+[\w/.-]*", text):
        assert url in HOSTS, url
    assert not re.search(
        r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b", text
    )
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        assert set(re.findall(r'(?:src|href)="(/[^"]*)"', text)) <= set(PAGE_FILES)
    if file.suffix == ".js":
        imports = re.findall(r'(?:from|import|import\()\s*"\./([\w./-]+)"', text)
        assert {f"/page/{name}" for name in imports} <= set(PAGE_FILES)
        assert text.startswith("// ")
    assert file.stat().st_size < 32 << 10


def test_all_of_it_is_light_and_packed() -> None:
    assert sum(file.stat().st_size for file in OWN_FILES) < 192 << 10
    assert sum(file.stat().st_size for file in VENDOR_FILES) < 1_200_000
    assert {*OWN_FILES, *VENDOR_FILES} == set(PAGE_FILES.values())
    assert b"/" in PAGE_PATHS
    project = tomllib.loads((PAGE_DIR.parent.parent.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["modelmill.serve"]
    carried = {file for pattern in patterns for file in PAGE_DIR.parent.glob(pattern)}
    assert {*OWN_FILES, *VENDOR_FILES} <= carried


def test_vendored_files_are_those_of_the_packages_that_are_named() -> None:
    """Each with its licence, source and sha256; none that is not listed."""
    text = (VENDOR_DIR / "LICENSES.txt").read_text()
    listed = dict(re.findall(r"^([0-9a-f]{64})  ([\w./-]+)  [\w./-]+$", text, re.MULTILINE))
    files = {
        hashlib.sha256(file.read_bytes()).hexdigest(): file.relative_to(VENDOR_DIR).as_posix()
        for file in VENDOR_FILES
        if file.name != "LICENSES.txt"
    }
    assert files == listed
    packages = re.findall(
        r"^source: https://registry\.npmjs\.org/(.+)/-/.+\.tgz$", text, re.MULTILINE
    )
    archives = re.findall(r"^archive: [0-9a-f]{64}$", text, re.MULTILINE)
    licences = re.findall(r"^licence: (.+)$", text, re.MULTILINE)
    assert len(packages) == len(archives) == len(licences) == 4
    assert all(re.match(r"MIT|BSD-3-Clause|Apache-2\.0", licence) for licence in licences)


def test_libraries_for_code_and_math_are_not_part_of_the_first_load() -> None:
    """They are imported by a call, when an answer has code or a formula."""
    for name in ("highlight.min.js", "katex.min.js", "katex.min.css"):
        users = [file for file in OWN_FILES if name in file.read_text("utf-8")]
        assert [file.name for file in users] == ["math.js" if "katex" in name else "code.js"]
        assert f'from "./vendor/{name}"' not in users[0].read_text()


@pytest.mark.skipif(
    shutil.which("node") is None,
    reason="needs node for the page's own file: apt-get install nodejs",
)
def test_a_rate_needs_time_to_be_one(tmp_path: Path) -> None:
    """Pieces that come at once say how they were sent: 205 tokens within a millisecond are no
    204,285 a second.
    """
    for name, text in (
        ("pace.mjs", (Path(__file__).parent / "pace.mjs").read_text()),
        ("package.json", "{}"),
    ):
        (tmp_path / name).write_text(
            text.replace("../../modelmill/serve/page/pace.js", "./page.mjs")
        )
    (tmp_path / "page.mjs").write_text((PAGE_DIR / "pace.js").read_text())
    cases = [
        [0],
        [0, [2000, 205]],
        [0, [2000, 1], [2001, 204]],
        [0, [500, 1], [749, 50]],
        [0, [500, 1], [1500, 50]],
        [0, [500, 20], [1500, 10], [2500, 10]],
        [0, [500, 1]],
    ]
    words = ["node", str(tmp_path / "pace.mjs"), json.dumps(cases)]
    result = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    assert result == [
        "",
        "first token after 2.00 s · 205 tokens",
        "first token after 2.00 s · 205 tokens",
        "first token after 0.50 s · 51 tokens",
        "50.0 tokens/s · first token after 0.50 s · 51 tokens",
        "10.0 tokens/s · first token after 0.50 s · 40 tokens",
        "first token after 0.50 s · 1 token",
    ]


class Buttons(HTMLParser):
    """(aria-label, visible text) of every button and link."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[tuple[str, str]] = []
        self._name: str | None = None
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("button", "a", "summary"):
            self._name, self._text = dict(attrs).get("aria-label"), []

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("button", "a", "summary") and self._name is not None:
            self.named.append((self._name, "".join(self._text).strip()))
            self._name = None


def test_names_of_buttons_hold_their_text() -> None:
    """WCAG 2.5.3: who says what he sees means the button. Names begin with it."""
    page = Buttons()
    page.feed((PAGE_DIR / "index.html").read_text())
    assert page.named
    scripts = {file.name: file.read_text() for file in PAGE_DIR.glob("*.js")}
    texts = "\n".join(scripts.values())
    made = re.findall(r'\bact\("([^"]+)", "([^"]+)"', texts)
    assert len(made) >= 5
    pairs = [*page.named, *((name, text) for text, name in made)]
    assert [(name, text) for name, text in pairs if not name.lower().startswith(text.lower())] == []
    # every other button of the scripts with a name: its text is an icon, or copied()'s, or act()'s
    attributes = re.findall(r'h\("button", \{(.*?)(?:onclick|\})', texts, re.DOTALL)
    labels = {
        label[1]
        for each in attributes
        if (label := re.search(r'"aria-label": ([^,]+),', each)) and 'class: "icon"' not in each
    }
    assert labels == {'"Copy the code"', "label"}
    # a text that changes takes the name along
    changes = [name for name, text in scripts.items() if '"Copied"' in text]
    assert changes == ["dom.js"]
    assert 'button.removeAttribute("aria-label")' in scripts["dom.js"]

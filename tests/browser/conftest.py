"""A real browser, and a server with a model that writes and one that sees: the real ones where they
are at hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tests.conftest import ROOT, shared_dir
from tests.models.sam_seeded import small_file
from tests.serve.server_process import ServerProcess

OUT = ROOT / "out" / "browser"
FLAGS = ("--device", "cpu", "--threads", "2", "--kv-cache-bytes", "200000000", "--port", "0")
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SECONDS = 300.0


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser; a skip that says what is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="needs playwright: pip install -e '.[browser]'",
        exc_type=ImportError,
    )
    path = next(
        (
            browser_path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (browser_path := shutil.which(name))
        ),
        "",
    )
    if not path:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=list(CHROMIUM))
        yield browser
        browser.close()


@dataclass(frozen=True)
class Engines:
    """Folders; real: whether they hold weights that mean something."""

    language_engine: Path
    segment_engine: Path
    has_real_language: bool
    has_real_segment: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a server: 2,048 of SmolLM2's 8,192 tokens are enough here; the tiny LLaMA takes 512 in
        all.
        """
        return (*FLAGS, "--max-model-len", "2048") if self.has_real_language else FLAGS


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """SmolLM2 (make demo leaves it) or a tiny trained LLaMA; MobileSAM or a small SAM with seeded
    weights.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    shared, own = shared_dir(), tmp_path_factory.mktemp("engines")
    smol = ROOT / "out" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tiny = None if shared is None else shared / "data/models/stories260K"
    weights = None if shared is None else shared / "data/models/mobile_sam/mobile_sam.safetensors"
    if smol.exists():
        writer = _build(
            smol,
            OUT / "smollm2.engine",
            BuildConfig(dtype="bfloat16", quantization="int8", target="cpu"),
        )
    elif tiny is not None:
        writer = _build(tiny, own / "stories.engine", BuildConfig(dtype="float32", target="cpu"))
    else:
        pytest.skip(
            "needs a model that writes: make demo leaves one; or ../shared/data: CONTRIBUTING.md, "
            "Test data"
        )
    if weights is not None:
        viewer = _build(
            weights, OUT / "mobilesam.engine", BuildConfig(dtype="float32", target="cpu")
        )
    else:
        viewer = _build(
            small_file(own), own / "sam.engine", BuildConfig(dtype="float32", target="cpu")
        )
    return Engines(writer, viewer, smol.exists(), weights is not None)


def _build(checkpoint: Path, out: Path, config: BuildConfig) -> Path:
    if not out.exists():
        build_engine(checkpoint, out, config, check=False, tune=False)
    return out


@pytest.fixture(scope="session")
def server(engines: Engines) -> Iterator[ServerProcess]:
    names = ("--served-model-name", "writer", "--served-model-name", "viewer")
    with ServerProcess(
        engines.language_engine, engines.segment_engine, *names, flags=engines.flags
    ) as serving:
        yield serving


Open = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any, server: ServerProcess) -> Iterator[Open]:
    """Opens the page in a fresh window; at the end it must have no errors, and no requests to
    other hosts.

    sampling: what the page's settings hold. url: of another server. The rest: Playwright's options
    of a context.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(
        sampling: str = '{"temperature": 0, "max_tokens": 60}',
        url: str = server.url,
        **options: Any,
    ) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1180, "height": 800}, **options})
        contexts.append(context)
        context.add_init_script(
            "localStorage.getItem('modelmill.sampling') ?? "
            f"localStorage.setItem('modelmill.sampling', '{sampling}')"
        )
        page = context.new_page()
        page.set_default_timeout(1000 * SECONDS)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: (
                wrong.append(message.text) if "Content Security" in message.text else None
            ),
        )
        page.on(
            "request",
            lambda sent_request: (
                wrong.append(sent_request.url)
                if not sent_request.url.startswith((url, "data:", "blob:"))
                else None
            ),
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps a picture of a page under out/browser."""

    def take(page: Any, name: str) -> None:
        page.screenshot(path=OUT / f"{name}.png")

    return take

"""Engines that are added, removed and rebuilt while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from modelmill.artifact.manifest import MANIFEST_FILE
from modelmill.serve.app import make_app
from modelmill.serve.catalogue.entries import CatalogueEntry, read_manifest
from modelmill.serve.catalogue.folder_watch import FolderWatch, scan_engine_files, stat_engine_files
from modelmill.serve.catalogue.managed_model import ManagedModel
from modelmill.serve.service import Service
from tests.serve.asgi_client import Client
from tests.serve.catalogue.managed import GatedLauncher, Models, managed_models

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "stop_token_ids": []}


class WatchedFolder:
    """A served folder that holds the engines ``a`` and ``b``, and looks at it on demand."""

    def __init__(self, models: Models, folder: Path) -> None:
        self.models, self.folder = models, folder
        self.service = Service(models.manager.engine_clients_by_name(), catalogue=models.manager)
        self.client = Client(make_app(self.service))
        self.watch = FolderWatch(models.manager, folder, self._make)
        self.watch.set_callbacks(self.service.add_model, self.service.remove_model)

    def _make(self, entry: CatalogueEntry) -> ManagedModel:
        self.models.launchers.setdefault(entry.name, GatedLauncher())
        engine = self.models._engine(entry.name, read_manifest(entry.path))
        return ManagedModel(entry, engine, float("inf"), 1000)

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            paths = [model.path for model in self.models.manager.models]
            self.watch.apply_stable_changes(scan_engine_files(self.folder, paths))

    async def complete(self, name: str) -> int:
        response = await self.client.post("/v1/completions", {"model": name, **COMPLETION})
        return response.status

    async def names(self) -> set[str]:
        return {each["id"] for each in (await self.client.get("/v1/models")).json["data"]}


Check = Callable[[WatchedFolder], Coroutine[Any, Any, None]]


def run(stories: Path, folder: Path, check: Check) -> None:
    for name in ("a", "b"):
        shutil.copytree(stories, folder / name)

    async def main() -> None:
        async with managed_models(stories, "a", "b") as models:
            for model in models.manager.models:
                model.entry = CatalogueEntry(model.name, folder / model.name)
                model.reread_manifest()
            watched = WatchedFolder(models, folder)
            try:
                watched.look()
                await check(watched)
            finally:
                watched.service.close()

    asyncio.run(main())


def touch(path: Path) -> None:
    """Give a manifest another time, as a rebuild does."""
    status = (path / MANIFEST_FILE).stat()
    os.utime(path / MANIFEST_FILE, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_new_engine_is_served_once_it_is_whole(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        assert await watched.complete("c") == 404
        shutil.copytree(stories, tmp_path / "c.engine")
        watched.look(1)
        assert await watched.names() == {"a", "b"}
        watched.look(1)
        assert await watched.names() == {"a", "b", "c"}
        assert await watched.complete("c") == 200
        watched.look()
        assert len(watched.models.manager.models) == 3

    run(stories, tmp_path, check)


def test_a_removed_engine_ends_its_requests_first(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        lease = await watched.models.acquire("a")
        model = watched.models["a"]
        shutil.rmtree(tmp_path / "a")
        watched.look(1)
        assert await watched.names() == {"a", "b"}
        watched.look(1)
        assert await watched.names() == {"b"}
        assert await watched.complete("a") == 404
        assert model.instance is not None
        lease.release()
        await watched.models.until(lambda: model.instance is None)
        assert await watched.complete("b") == 200

    run(stories, tmp_path, check)


def test_the_metrics_of_a_removed_engine_go_with_its_last_request(
    stories: Path, tmp_path: Path
) -> None:
    async def series(watched: WatchedFolder) -> set[str]:
        text = (await watched.client.get("/metrics")).body.decode()
        return {line for line in text.splitlines() if 'model_name="a"' in line}

    async def check(watched: WatchedFolder) -> None:
        assert await watched.complete("a") == 200
        lease = await watched.models.acquire("a")
        model = watched.models["a"]
        shutil.rmtree(tmp_path / "a")
        watched.look()
        assert any("generation_tokens" in line for line in await series(watched))
        lease.release()
        await watched.models.until(lambda: model.instance is None)
        await asyncio.sleep(0)
        assert await series(watched) == set()
        shutil.copytree(stories, tmp_path / "a")
        watched.look()
        assert await watched.complete("a") == 200
        counted = [line for line in await series(watched) if "generation_tokens_total" in line]
        assert [line.split()[-1] for line in counted] == ["4.0"]

    run(stories, tmp_path, check)


def test_requests_that_wait_for_a_removed_engine_are_refused(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        launcher = watched.models.launchers["a"]
        launcher.gate.clear()
        waiting = asyncio.ensure_future(watched.complete("a"))
        await watched.models.until(lambda: launcher.launches)
        shutil.rmtree(tmp_path / "a")
        watched.look()
        assert await waiting == 503
        launcher.gate.set()

    run(stories, tmp_path, check)


def test_without_any_engine_every_name_is_unknown(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        for name in ("a", "b"):
            shutil.rmtree(tmp_path / name)
        watched.look()
        assert await watched.names() == set()
        assert await watched.complete("a") == 404
        shutil.copytree(stories, tmp_path / "a")
        watched.look()
        assert await watched.complete("a") == 200

    run(stories, tmp_path, check)


def test_a_rebuilt_engine_is_reloaded_beside_its_requests(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        lease = await watched.models.acquire("a")
        first = watched.models["a"].engine
        touch(tmp_path / "a")
        touch(tmp_path / "b")
        watched.look(1)
        assert watched.models.launchers["a"].launches == 1
        watched.look(1)
        await watched.models.until(lambda: watched.models["a"].engine is not first)
        assert await watched.complete("a") == 200
        lease.release()
        assert watched.models.launchers["a"].launches == 2
        assert not watched.models["b"].has_changed_files
        assert watched.models.launchers["b"].launches == 0

    run(stories, tmp_path, check)


def test_what_is_still_written_is_left_alone(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        shutil.copytree(stories, tmp_path / "c")
        for number in range(3):
            (tmp_path / "c" / "part").write_bytes(b"x" * number)
            watched.look(1)
        assert await watched.names() == {"a", "b"}

    run(stories, tmp_path, check)


def test_what_cannot_be_served_is_refused_once(
    stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(watched: WatchedFolder) -> None:
        shutil.copytree(stories, tmp_path / "a.engine")  # the name is taken
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / MANIFEST_FILE).write_text("{")
        with caplog.at_level(logging.WARNING, "modelmill.serve"):
            watched.look(4)
        assert await watched.names() == {"a", "b"}
        assert [each.message for each in caplog.records].count("model not added") == 2

    run(stories, tmp_path, check)


def test_tokenizers_are_read_before_the_first_request(stories: Path, tmp_path: Path) -> None:
    async def check(watched: WatchedFolder) -> None:
        engines = [model.engine for model in watched.models.manager.models]
        await watched.models.until(lambda: all(each.input_modalities for each in engines))
        assert {model.state for model in watched.models.manager.models} == {"unloaded"}

    run(stories, tmp_path, check)


def test_a_look_at_what_is_not_there(tmp_path: Path) -> None:
    assert scan_engine_files(tmp_path / "none", [tmp_path / "x"]).engines == {}
    assert scan_engine_files(None, []).entries == []
    assert stat_engine_files(tmp_path) is None

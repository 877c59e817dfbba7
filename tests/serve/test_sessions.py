"""Sessions over HTTP: saved by one server, restored by another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import BuildConfig, RunConfig
from modelmill.llm import build_engine
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve.app import make_app
from modelmill.serve.service import Service, ServiceLimits
from tests.models import tiny_models
from tests.runtime import tiny
from tests.serve.asgi_client import Client
from tests.serve.service_thread import ServiceThread
from tests.serve.thread_worker import ThreadLauncher, served_engine

PROMPT = list(tiny.prompts(1, 40, 40)[0])
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "logprobs": 5}
SAVE = {"model": "tiny", "name": "chat-1", "tokens": PROMPT}
RESTORE = {"model": "tiny", "name": "chat-1"}


@contextlib.asynccontextmanager
async def session_client(
    folder: Path | None,
    key: str | None = None,
    launcher: ThreadLauncher | None = None,
    **limits: Any,
) -> AsyncIterator[Client]:
    """A client of a fresh server with a session folder."""
    async with served_engine(launcher) as (engine, _):
        service = Service({"tiny": engine}, ServiceLimits(session_dir=folder, **limits))
        try:
            yield Client(make_app(service), key)
        finally:
            service.close()


async def ask(client: Client) -> tuple[Any, int]:
    """The answer with its log-probabilities, and its cached tokens."""
    response = await client.post("/v1/completions", ASK)
    assert response.status == 200, response.body
    usage = response.json["usage"]
    return response.json["choices"], usage["prompt_tokens_details"]["cached_tokens"]


def test_another_server_goes_on_bit_for_bit(tmp_path: Path) -> None:
    async def main() -> None:
        async with session_client(tmp_path) as client:
            saved = await client.post("/v1/sessions/save", SAVE)
            assert saved.status == 200, saved.body
            size = saved.json["bytes"]
            assert saved.json == {"name": "chat-1", "model": "tiny", "tokens": 40, "bytes": size}
            assert (tmp_path / "chat-1.session").stat().st_size == size
            expected = await ask(client)
            assert expected[1] == 32  # one token of the last page is computed again
        async with session_client(tmp_path) as client:
            restored = await client.post("/v1/sessions/restore", RESTORE)
            assert restored.status == 200, restored.body
            assert restored.json["tokens"] == 40
            assert await ask(client) == expected

    asyncio.run(main())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny engine folder, which ranks can open."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.save_hf("llama", folder / "checkpoint")
    config = BuildConfig(dtype="float32", target="cpu")
    build_engine(folder / "checkpoint", folder / "engine", config, check=False, tune=False)
    return folder / "engine"


def test_two_ranks_save_and_restore(llama: Path, tmp_path: Path) -> None:
    """One file for both; a server on one rank refuses it in one line."""

    def ranks(tp: int) -> ThreadLauncher:
        options = RunConfig(device="cpu", tp=tp, threads=1, page_size=8, kv_cache_bytes=1 << 21)
        return ThreadLauncher(lambda: EngineCore.open(llama, options))

    async def main() -> None:
        async with session_client(tmp_path, launcher=ranks(2)) as client:
            saved = await client.post("/v1/sessions/save", SAVE)
            assert (saved.status, saved.json["tokens"]) == (200, 40), saved.body
            assert [path.name for path in tmp_path.iterdir()] == ["chat-1.session"]
            expected = await ask(client)
        async with session_client(tmp_path, launcher=ranks(2)) as client:
            restored = await client.post("/v1/sessions/restore", RESTORE)
            assert (restored.status, restored.json["tokens"]) == (200, 40), restored.body
            assert await ask(client) == expected
        async with session_client(tmp_path, launcher=ranks(1)) as client:
            refused = await client.post("/v1/sessions/restore", RESTORE)
            assert refused.status == 400
            assert refused.json["error"]["message"] == (
                "the session was saved with --tp 2 and the engine runs with --tp 1; serve it with "
                "--tp 2 to restore it"
            )

    asyncio.run(main())


def test_a_key_restores_only_what_it_has_saved(tmp_path: Path) -> None:
    keys = {"api_keys": ("mine", "theirs")}

    async def main() -> None:
        async with session_client(tmp_path, "mine", **keys) as client:
            assert (await client.post("/v1/sessions/save", SAVE)).status == 200
            other = Client(client.app, "theirs")
            missing = await other.post("/v1/sessions/restore", RESTORE)
            assert (missing.status, missing.json["error"]["code"]) == (404, "session_not_found")
            expected = await ask(client)
        # the tenants of another process have other salts
        async with session_client(tmp_path, "mine", **keys) as client:
            assert (await client.post("/v1/sessions/restore", RESTORE)).status == 200
            assert await ask(client) == expected
            assert (await ask(Client(client.app, "theirs")))[1] == 0
        assert "mine" not in str(list(tmp_path.rglob("*")))

    asyncio.run(main())


def test_what_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with session_client(tmp_path, session_bytes=2000) as client:
            for body in (
                {**SAVE, "name": "../x"}, {**SAVE, "name": ".x"}, {**SAVE, "name": ""},
                {**SAVE, "prompt": "x"}, {**SAVE, "tokens": []}, {**SAVE, "tokens": PROMPT[:3]},
            ):  # fmt: skip
                refused = await client.post("/v1/sessions/save", body)
                assert refused.status == 400, (body, refused.body)
            unknown = await client.post("/v1/sessions/save", {**SAVE, "tokens": [10**7]})
            assert (unknown.status, unknown.json["error"]["param"]) == (400, "tokens")
            large = await client.post("/v1/sessions/save", SAVE)
            assert large.status == 400
            assert "--session-bytes leaves 1.95 KiB" in large.json["error"]["message"]
            (tmp_path / "chat-1.session").write_bytes(b"half a")
            damaged = await client.post("/v1/sessions/restore", RESTORE)
            assert damaged.status == 400
            assert damaged.json["error"]["message"] == "the file is not a saved session"
            assert [path.name for path in tmp_path.iterdir()] == ["chat-1.session"]
        async with session_client(None) as client:
            none = await client.post("/v1/sessions/save", SAVE)
            assert (none.status, none.json["error"]["code"]) == (404, "no_sessions")

    asyncio.run(main())


def test_a_conversation_is_saved_through_its_template(
    running: ServiceThread, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Once upon a time there was a little dog. " * 3}]
    client = running.limited_client(session_dir=tmp_path)
    body = {"model": "stories", "name": "dog", "messages": messages, "cache_salt": "session"}
    saved = running.run(client.post("/v1/sessions/save", body))
    assert saved.status == 200, saved.body
    restored = {"name": "dog", "cache_salt": "again"}
    assert running.run(client.post("/v1/sessions/restore", restored)).json["tokens"] > 16
    ask = {"model": "stories", "messages": messages, "max_tokens": 1, "cache_salt": "again"}
    usage = running.post("/v1/chat/completions", ask).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_sessions_are_listed_and_deleted(tmp_path: Path) -> None:
    keys = {"api_keys": ("mine", "theirs")}

    async def main() -> None:
        async with session_client(tmp_path, "mine", **keys) as client:
            other = Client(client.app, "theirs")
            assert (await client.get("/v1/sessions")).json == {"object": "list", "data": []}
            for name in ("chat-1", "chat-2"):
                saved = await client.post("/v1/sessions/save", {**SAVE, "name": name})
                assert saved.status == 200
            listed = (await client.get("/v1/sessions")).json["data"]
            assert {each["name"] for each in listed} == {"chat-1", "chat-2"}
            assert {each["bytes"] for each in listed} == {saved.json["bytes"]}
            assert all(each["created"] > 1_700_000_000 for each in listed)
            assert (await other.get("/v1/sessions")).json["data"] == []
            path = "/v1/sessions/chat-1"
            assert (await other.call("DELETE", path)).status == 404
            deleted = await client.call("DELETE", path)
            assert deleted.json == {"name": "chat-1", "deleted": True}
            assert (await client.call("DELETE", path)).json["error"]["code"] == (
                "session_not_found"
            )
            assert (await client.post("/v1/sessions/restore", RESTORE)).status == 404
            (left,) = (await client.get("/v1/sessions")).json["data"]
            assert left["name"] == "chat-2"
            assert (await client.call("DELETE", "/v1/sessions/.x")).status == 400
        async with session_client(None) as client:
            assert (await client.get("/v1/sessions")).json["error"]["code"] == "no_sessions"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/sessions/save", "/v1/sessions/restore"])
def test_without_a_folder_nothing_is_saved(running: ServiceThread, path: str) -> None:
    assert running.post(path, {"model": "stories", "name": "x"}).status == 404

"""The server over real sockets, with the clients that people have."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from modelmill.cli.serve import (
    Args,
    _make_server_options,
    default_served_name,
    register_and_announce_address,
)
from modelmill.core.server_records import list_running_and_prune_stale
from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from modelmill.serve.server import MAX_OPEN_FILES
from tests.serve.server_process import ServerProcess, read_all
from tests.wait import TIMEOUT_SECONDS, time_limit

TALK: list[Any] = [{"role": "user", "content": "Tell me a story"}]
KV = (
    "KV cache: 7.60 MiB for 6,224 tokens, allocated as they arrive; up to 7.60 MiB of it "
    "cache prompt prefixes"
)
LONG = {
    "model": "stories",
    "prompt": "Once upon a time",
    "temperature": 0,
    "max_tokens": 450,
    "ignore_eos": True,
}


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_openai_client(server: ServerProcess, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    answer_text = llm.chat(TALK, params, progress=False)[0].outputs[0].text
    with client(server) as api:
        assert [model.id for model in api.models.list()] == ["stories"]
        options: Any = {"model": "stories", "messages": TALK, "temperature": 0, "max_tokens": 20}
        completion = api.chat.completions.create(**options)
        assert completion.choices[0].message.content == answer_text
        chunks = list(
            api.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            == answer_text
        )
        assert (
            chunks[-1].usage == completion.usage
            or chunks[-1].usage.total_tokens == completion.usage.total_tokens
        )
        text = api.completions.create(
            model="stories", prompt=["Once upon", "The"], max_tokens=3, temperature=0
        )
        assert len(text.choices) == 2
        with pytest.raises(openai.NotFoundError) as missing:
            api.chat.completions.create(**{**options, "model": "gpt"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            api.chat.completions.create(**{**options, "temperature": 3})
        assert wrong.value.param == "temperature"


def test_the_openai_client_for_asyncio(server: ServerProcess) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0
        ) as api:
            options: Any = {"model": "stories", "messages": TALK, "max_tokens": 12}

            async def streamed(seed: int) -> str:
                stream = await api.chat.completions.create(**options, seed=seed, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def completion_text(seed: int) -> str | None:
                return (
                    (await api.chat.completions.create(**options, seed=seed))
                    .choices[0]
                    .message.content
                )

            seeds = range(12)
            assert await asyncio.gather(*map(streamed, seeds)) == await asyncio.gather(
                *map(completion_text, seeds)
            )

    asyncio.run(main())


def test_loading_is_reported_and_requests_are_refused_meanwhile(stories: Path) -> None:
    with ServerProcess(stories, ready=False) as serving:
        status, body, _ = serving.request("/health")
        refused = serving.request("/v1/completions", {**LONG, "max_tokens": 1})
        if serving.request("/health")[0] == 503:  # it was loading all the time
            assert (status, body["status"]) == (503, "loading")
            assert body["engines"][0]["progress"].keys() == {"stage", "done", "total", "fraction"}
            status, body, headers = refused
            assert (status, body["error"]["code"]) == (503, "not_ready")
            assert "retry-after" in headers
        serving.wait(200)


def test_health_without_a_body_and_more_connections_than_a_shell_allows(
    server: ServerProcess,
) -> None:
    with server.connect() as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = read_all(sock)
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(b"\r\n\r\n")
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == (hard if 0 <= hard < MAX_OPEN_FILES else max(soft, MAX_OPEN_FILES))


def test_sigterm_lets_running_answers_finish(stories: Path) -> None:
    with ServerProcess(stories, "--shutdown-timeout", 60) as serving:
        assert serving.read_line() == f"modelmill: stories is ready; {KV}\n"
        (worker,) = serving.workers
        worker.suspend()
        sock = serving.start_post("/v1/completions", {**LONG, "stream": True})
        head = sock.recv(1 << 16)  # it was taken
        serving.process.send_signal(signal.SIGTERM)
        serving.wait(503, TIMEOUT_SECONDS)
        status, body, _ = serving.request("/v1/completions", LONG)
        assert (status, body["error"]["code"]) == (503, "draining")
        worker.resume()
        received = head + read_all(sock)
        sock.close()
        assert b'"finish_reason":"length"' in received
        assert received.count(b"data: [DONE]") == 1
        assert serving.finish() == (0, "")


@pytest.mark.parametrize("end_by", ["timeout", "twice"])
def test_a_shutdown_that_does_not_wait(stories: Path, end_by: str) -> None:
    patience = 0.05 if end_by == "timeout" else 60
    with ServerProcess(stories, "--shutdown-timeout", patience, "--max-num-seqs", 4) as serving:
        workers = serving.workers
        assert len(workers) == 1
        socks = [
            serving.start_post("/v1/completions", {**LONG, "n": 4, "stream": True})
            for _ in range(40)
        ]
        socks[0].recv(10)
        serving.wait_for_queue(39)
        serving.process.send_signal(signal.SIGTERM)
        if end_by == "twice":
            serving.process.send_signal(signal.SIGINT)
        # less than the 60 s of its --shutdown-timeout, or than those of the answers it has begun
        with time_limit():
            received = [read_all(sock) for sock in socks]
            assert serving.finish()[0] == 0
        # the last may have come in before the signal or after it: an event that ends it, or a
        # refusal
        assert (
            json.loads(received[-1][received[-1].index(b"{") : received[-1].rindex(b"}") + 1])[
                "error"
            ]["code"]
            == "draining"
        )
        assert b"[DONE]" not in received[-1]
        for sock in socks:
            sock.close()
        assert not any(psutil.pid_exists(worker.pid) for worker in workers)


def test_a_worker_that_is_killed(server: ServerProcess) -> None:
    """Running requests end with an error, /health is 503, and the next request is served."""
    (worker,) = server.workers
    worker.suspend()
    stream = server.start_post("/v1/completions", {**LONG, "n": 8, "stream": True})
    unstreamed = server.start_post("/v1/completions", {**LONG, "n": 8})
    received = stream.recv(1 << 12)
    worker.kill()
    with time_limit():
        while True:
            status, body, _ = server.request("/health")
            (engine,) = body["engines"]
            if status == 503 or engine["restarts"]:
                break
    assert engine["restarts"] or engine["state"] == "restarting"
    received += rest_of_chunked(stream)
    assert b'data: {"error"' in received
    assert b"engine_restarted" in received
    assert b"[DONE]" not in received
    assert unstreamed.recv(1 << 16).startswith(b"HTTP/1.1 503")
    body = server.wait(200)
    assert body["engines"][0]["restarts"] == 1
    assert server.request("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200
    assert len(server.workers) == 1
    for sock in (stream, unstreamed):
        sock.close()


def test_a_system_without_descriptors_for_a_while(stories: Path) -> None:
    """What cannot be started now is tried again, and said."""
    with ServerProcess(stories) as server:
        process, (worker,) = psutil.Process(server.process.pid), server.workers
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        worker.kill()
        assert server.process.stderr is not None
        failed = next(line for line in server.process.stderr if "worker failed" in line)
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
        entry = json.loads(failed)
        assert (entry["error"], entry["reason"]) == ("OSError", "Too many open files")
        assert server.wait(200)["engines"][0]["restarts"] >= 2
        assert server.request("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200


def test_a_log_that_is_not_read(stories: Path) -> None:
    """A full pipe at stderr delays no answer; once it is read, the log says how much is missing."""
    with ServerProcess(stories, "--log-level", "info") as server:
        for _ in range(800):  # each of them logs a line of more than 100 bytes
            assert server.request("/v1/models")[0] == 200
        assert server.process.stderr is not None
        assert len(os.read(server.process.stderr.fileno(), 1 << 16)) > 1 << 15
        assert server.request("/v1/models")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        code, log = server.finish()
    assert code == 0
    assert '"event": "log lines dropped", "lines": ' in log


def rest_of_chunked(sock: Any) -> bytes:
    """Until the last chunk."""
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += sock.recv(1 << 16)
    return received


def test_a_second_server_on_the_port_and_an_engine_that_is_none(
    server: ServerProcess, tmp_path: Path, cli: Any
) -> None:
    port = server.address[1]
    code, _, stderr = cli("serve", tmp_path, "--port", port)
    assert code == 2
    assert f"--port {port} is in use; " in stderr
    assert f"modelmill ps lists them, modelmill stop {port} ends the one at this port" in stderr
    code, _, stderr = cli("serve", tmp_path / "none", "--port", 0)
    assert code == 1
    assert stderr == (
        f"modelmill: {tmp_path / 'none'}: there is no such file or folder; give a checkpoint's "
        "folder or file, or a name on a hub (org/name)\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "ENGINE"),
        (["serve", "a", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "a", "--port", "99999"], "--port"),
        (["serve", "a", "a"], "--served-model-name"),
        (["serve", "a", "b", "--served-model-name", "x"], "--served-model-name"),
        (["serve", "a", "--api-key-file", "/nonexistent/keys"], "--api-key-file"),
        (["serve", "a", "--api-key", " "], "key"),
    ],
    ids=str,
)
def test_command_lines_that_make_no_sense(words: list[str], message: str, cli: Any) -> None:
    code, out, stderr = cli(*words)
    assert (code, out) == (2, "")
    assert message in stderr
    assert len(stderr.splitlines()) == 1


def test_where_it_listens_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    url = "http://127.0.0.1:8123"
    with contextlib.ExitStack() as record:
        register_and_announce_address(Args(json=True), url, ["a", "b"], "loading a, b", record)
        out, stderr = capsys.readouterr()
        assert json.loads(out) == {"url": url, "models": ["a", "b"]}
        assert out.count("\n") == 1
        assert stderr == f"modelmill: listening on {url}; loading a, b\n"
        [server] = list_running_and_prune_stale()
        assert (server.url, server.models) == (url, ("a", "b"))
    assert list_running_and_prune_stale() == []
    with contextlib.ExitStack() as record:
        register_and_announce_address(Args(), url, ["a"], "loading a", record)
        assert capsys.readouterr().out == ""


def test_spaces_around_a_key_are_none_of_it() -> None:
    """A client's are taken off, so that a key with them would never fit."""
    place = _make_server_options(Args(engines=(Path("a"),), api_key=(" abc ", "d e")))
    assert place.limits.api_keys == ("abc", "d e")


def test_two_engines_from_a_file(stories: Path, tmp_path: Path) -> None:
    """Engines and options in a YAML file; what stands on the command line goes before it.

    Both have room for their KV cache and answer alike.
    """
    file = tmp_path / "serve.yaml"
    engines = [str(stories), str(stories)]
    options = {
        "engines": engines,
        "served-model-name": ["one", "two"],
        "max_num_seqs": 4,
        "api-key": ["sesame"],
    }
    file.write_text(json.dumps({**options, "max-waiting": 3, "shutdown_timeout": 5}))
    with ServerProcess("--config", file, "--max-waiting", 0, ready=False) as serving:
        serving.wait(200)
        key = {"authorization": "Bearer sesame"}
        assert serving.request("/v1/models")[0] == 401
        assert [each["id"] for each in serving.request("/v1/models", **key)[1]["data"]] == [
            "one",
            "two",
        ]
        body = {**LONG, "model": "two", "max_tokens": 8}
        answers = [
            serving.request("/v1/completions", {**body, "model": name}, **key)[1]
            for name in ("one", "two")
        ]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        page = serving.request("/metrics", **key)[1]
        assert 'model_name="one"' in page
        assert 'model_name="two"' in page
        # four rows and none that wait: five answers are more than it takes
        status, reply, _ = serving.request(
            "/v1/completions", {**body, "n": 5, "temperature": 1}, **key
        )
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert len(serving.workers) == 2


def test_bench_serve_measures_it(server: ServerProcess, cli: Any) -> None:
    words = (
        "--num-prompts",
        6,
        "--input-len",
        4,
        "--output-len",
        5,
        "--concurrency",
        3,
        "--first-ms",
        1e6,
        "--json",
    )
    code, out, stderr = cli("bench", "serve", "--url", server.url, *words)
    assert code == 0, stderr
    report = json.loads(out)
    assert (report["requests"], report["failed"], report["output_tokens"], report["model"]) == (
        6,
        0,
        30,
        "stories",
    )
    assert report["good_requests_per_s"] == report["requests_per_s"] > 0
    assert cli("bench", "serve", "--url", server.url, "--num-prompts", 2, "--output-len", 3)[0] == 0
    code, _, stderr = cli(
        "bench", "serve", "--url", server.url, "--num-prompts", 1, "--model", "other"
    )
    assert code == 1
    assert "404" in stderr
    for wrong in (["bench", "serve"], ["bench", "serve", "x"], ["bench", "ops", "--url", "x"]):
        assert cli(*wrong)[0] == 2


def test_chat_with_a_server(
    server: ServerProcess, llm: LLM, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = [*TALK]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), progress=False)
    words = ("chat", "--url", server.url, "--temperature", 0, "--max-tokens", 12)
    for stream in ("--stream", "--no-stream"):
        monkeypatch.setattr("sys.stdin", io.StringIO(TALK[0]["content"] + "\n/exit\n"))
        code, out, stderr = cli(*words, stream)
        assert code == 0, stderr
        assert out == answer.outputs[0].text + "\n"
        assert "12 answer tokens" in stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\nshort\n"))
    code, out, stderr = cli(*words, "--json")
    assert code == 0
    assert "400" in stderr
    assert [message["role"] for message in json.loads(out)["messages"]] == ["user", "assistant"]
    assert cli("chat", "--url", "127.0.0.1:1")[0] == 1
    assert cli("chat")[0] == cli("chat", "x", "--url", "y")[0] == 2


def test_an_engine_is_served_under_the_name_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "3f2a.engine").mkdir(parents=True)
    link = tmp_path / "chat.engine"
    link.symlink_to(tmp_path / "store" / "3f2a.engine")
    assert default_served_name(link) == "chat"
    monkeypatch.chdir(tmp_path)
    for typed in ("chat.engine", "./chat.engine", "store/../chat.engine", "chat.engine/"):
        assert default_served_name(Path(typed)) == "chat"
    monkeypatch.chdir(tmp_path / "store" / "3f2a.engine")
    assert default_served_name(Path(".")) == "3f2a"
    assert default_served_name(Path("..")) == "store"

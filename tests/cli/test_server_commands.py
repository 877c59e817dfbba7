"""``ps``, ``stop`` and ``launch`` beside servers that are small processes."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelmill.cli import launch, ps, stop
from modelmill.cli.launch import fetch_models, served_context_length
from modelmill.core.errors import UsageError
from modelmill.core.server_records import ServerRecord, list_running_and_prune_stale

SERVER = """
import http.server, json, os, signal, sys
from modelmill.core.server_records import register_server
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "loading"}).encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with register_server(f"http://127.0.0.1:{server.server_port}", sys.argv[1:]):
    print("ready", flush=True)
    server.serve_forever()
"""
Start = Callable[..., ServerRecord]


@pytest.fixture(autouse=True)
def no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch`` asks no server for its models; the model m has 4,096 tokens."""
    models = {"data": [{"id": "other"}, {"id": "m", "max_model_len": 4096}]}
    monkeypatch.setattr(launch, "fetch_models", lambda *_: models)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    processes = []

    def begin(*models: str) -> ServerRecord:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *models], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return next(
            server for server in list_running_and_prune_stale() if server.pid == process.pid
        )

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_servers_are_listed_with_their_state_and_ended(start: Start, cli: Any) -> None:
    first, second = start("small"), start("large", "other")
    code, out, _ = cli("ps", "--json")
    facts = out
    assert code == 0
    assert [each["models"] for each in facts] == [["small"], ["large", "other"]]
    assert {each["state"] for each in facts} == {"loading"}
    assert facts[0]["memory_bytes"] > 1 << 20
    _, out, _ = cli("ps")
    assert "large, other" in out
    code, _, err = cli("stop", "other")
    assert (code, err.strip()) == (0, f"modelmill: {second.url} (large, other) has ended")
    assert [server.pid for server in list_running_and_prune_stale()] == [first.pid]
    assert cli("stop", "--all")[0] == 0
    assert list_running_and_prune_stale() == []


@pytest.mark.parametrize("what", ["model", "url", "port", "pid"])
def test_a_server_is_named_in_four_ways(what: str, start: Start, cli: Any) -> None:
    server = start("m")
    names = {
        "model": "m",
        "url": f"{server.url}/",
        "port": server.url.rpartition(":")[2],
        "pid": str(server.pid),
    }
    assert cli("stop", names[what])[0] == 0
    assert list_running_and_prune_stale() == []


def test_what_cannot_be_stopped_is_one_line(start: Start, cli: Any) -> None:
    assert cli("stop", "x")[::2] == (
        2, "modelmill: no running server is, or serves, x; none is running\n"
    )  # fmt: skip
    assert "name one server, or give --all" in cli("stop")[2]
    assert "name one server, or give --all" in cli("stop", "x", "--all")[2]
    server = start("m")
    assert f"there is m at {server.url}" in cli("stop", "x")[2]
    start("m")
    assert "name one address" in cli("stop", "m")[2]
    assert "must be at least 0" in cli("stop", "m", "--timeout", "-1")[2]


def test_a_server_that_does_not_end_in_time(
    start: Start, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("m")
    monkeypatch.setattr(psutil.Process, "terminate", lambda _: None)
    code, _, err = cli("stop", "m", "--timeout", "0.01")
    assert code == 1
    assert "still finishes answers after 0.01 s" in err


def test_what_stop_waits_for_is_said(
    start: Start, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("m")
    monkeypatch.setattr(psutil.Process, "terminate", lambda _: None)
    monkeypatch.setattr(stop, "SILENT_WAIT_SECONDS", 0.01)
    code, _, err = cli("stop", "m", "--timeout", "0.03")
    assert code == 1
    assert err.splitlines()[0] == (
        f"modelmill: {server.url} finishes its answers; waiting for at most 0.03 s"
    )


def test_a_server_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = ServerRecord("http://127.0.0.1:9", ("m",), 1, 0.0)
    facts = ps.fetch_server_facts(nobody)
    assert (facts["state"], facts["models"]) == (ps.NO_ANSWER_STATE, list(nobody.models))


def test_models_that_come_and_go_are_listed_with_their_state(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("first")
    states = {"a": "ready", "b": "unloaded", "c": "sleeping"}
    engines = [{"name": name, "state": state} for name, state in states.items()]
    monkeypatch.setattr(ps, "fetch_server_health", lambda _: {"status": "ok", "engines": engines})
    facts = ps.fetch_server_facts(server)
    assert facts["models"] == ["a", "b", "c"]
    assert facts["model_states"] == states
    assert ps.format_served_models(facts) == "a, b (unloaded), c (sleeping)"
    monkeypatch.setattr(ps, "fetch_server_health", lambda _: {"status": "ok", "engines": []})
    assert ps.format_served_models(ps.fetch_server_facts(server)) == "none now"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (61, "1 min"), (3700, "1 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations(seconds: int, text: str) -> None:
    assert ps.format_duration(seconds) == text


def launched(cli: Any, *words: str) -> dict[str, Any]:
    code, out, _ = cli("launch", *words, "--json")
    assert code == 0
    return dict(out)


@pytest.mark.parametrize(
    ("url", "client_url"),
    [
        ("http://0.0.0.0:8123", "http://127.0.0.1:8123"),
        ("http://[::]:8123", "http://[::1]:8123"),
        ("http://10.0.0.5:8123", "http://10.0.0.5:8123"),
    ],
)
def test_a_client_gets_an_address_that_it_can_reach(
    url: str, client_url: str, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    record = ServerRecord(url, ("m",), 1, 0.0)
    monkeypatch.setattr(launch, "list_running_and_prune_stale", lambda: [record])
    assert launched(cli, "claude")["env"]["ANTHROPIC_BASE_URL"] == client_url
    assert stop.find_server([record], client_url) is record


class Keyed(http.server.BaseHTTPRequestHandler):
    """A server with one key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["authorization"] == "Bearer right" else 401)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m", "max_model_len": 7}]}')

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""


def test_a_key_that_the_server_refuses_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Keyed) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert served_context_length(fetch_models(url, "right"), "m") == 7
        for key, name in ((launch.PLACEHOLDER_API_KEY, "an API key"), ("wrong", "another API key")):
            with pytest.raises(UsageError, match=f"wants {name}; give --api-key KEY"):
                fetch_models(url, key)
        server.shutdown()
    assert capsys.readouterr().err == ""
    assert served_context_length(fetch_models(url, "right"), "m") is None
    assert f"{url} does not answer now" in capsys.readouterr().err


def test_an_address_without_a_model_means_the_first_that_generates_text(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[Any] = [{"id": "sam", "engine_type": "segmentation"}, {"id": "m"}, {"id": "n"}]
    monkeypatch.setattr(launch, "fetch_models", lambda *_: {"data": cards})
    assert launched(cli, "codex", "--url", "http://a:1")["command"][-2:] == ["--model", "m"]
    for models in ({"data": cards[:1]}, None):
        monkeypatch.setattr(launch, "fetch_models", lambda *_, models=models: models)
        code, _, err = cli("launch", "claude", "--url", "http://a:1")
        assert code == 2
        assert err.startswith("modelmill: the server lists no model; give --model")


def test_names_for_a_shells_completion() -> None:
    """Each means one server."""
    servers = [
        ServerRecord("http://127.0.0.1:8000", ("a", "b"), 1, 0.0),
        ServerRecord("http://127.0.0.1:8001", ("b", "c"), 2, 0.0),
    ]
    assert stop.unambiguous_server_names(servers) == ["a", "c", "8000", "8001"]


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://[::1", "k"), ("http://a b", "k"), ("http://a", "k\nx"), ("http://a", "ключ")],
)
def test_addresses_and_keys_that_cannot_be_sent(url: str, key: str) -> None:
    with pytest.raises(UsageError, match="a character that cannot be sent") as refused:
        fetch_models(url, key)
    assert key not in str(refused.value) or key == "k"


@pytest.mark.parametrize("words", [("stop", "sm"), ("launch", "claude", "--model", "")])
def test_a_shell_completes_running_servers(words: tuple[str, ...], start: Start) -> None:
    start("small")
    answer = subprocess.run(
        [sys.executable, "-m", "modelmill"],
        env={
            **os.environ, "_MODELMILL_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("modelmill", *words)), "COMP_CWORD": str(len(words)),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout.split() == ["small"]


def test_claude_gets_the_running_server(start: Start, cli: Any) -> None:
    server = start("m")
    command = launched(cli, "claude")
    assert command["command"] == ["claude", "--model", "m"]
    assert command["env"]["ANTHROPIC_BASE_URL"] == server.url
    assert command["env"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "m"
    assert command["env"]["ANTHROPIC_API_KEY"] == ""  # it would be sent to the server
    assert command["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"


def test_codex_gets_a_provider_in_toml(cli: Any) -> None:
    command = launched(cli, "codex", "--url", "http://a:1/v1/", "--model", "m", "--api-key", "k")
    words = command["command"]
    settings = tomllib.loads("\n".join(words[i + 1] for i, w in enumerate(words[:6]) if w == "-c")
                             .replace("model_provider=modelmill", ""))  # fmt: skip
    assert settings["model_providers"]["modelmill"] == {
        "name": "modelmill",
        "base_url": "http://a:1/v1",
        "wire_api": "responses",
        "env_key": "MODELMILL_API_KEY",
    }
    assert settings["model_context_window"] == 4096
    assert command["env"] == {"MODELMILL_API_KEY": "k"}
    assert words[-2:] == ["--model", "m"]


def test_opencode_gets_its_whole_configuration(cli: Any) -> None:
    command = launched(cli, "opencode", "--url", "http://a:1", "--model", "org/m")
    config = json.loads(command["env"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "modelmill/org/m"
    provider = config["provider"]["modelmill"]
    assert provider["options"]["baseURL"] == "http://a:1/v1"
    assert provider["models"] == {"org/m": {"name": "org/m"}}
    command = launched(cli, "opencode", "--url", "http://a:1", "--model", "m")
    provider = json.loads(command["env"]["OPENCODE_CONFIG_CONTENT"])["provider"]["modelmill"]
    assert provider["models"]["m"]["limit"] == {"context": 4096, "output": 1024}


def test_the_printed_line_is_shell(cli: Any) -> None:
    code, out, _ = cli("launch", "opencode", "--url", "http://a:1", "--model", "it's")
    assert code == 0
    setting, program = shlex.split(out)
    assert json.loads(setting.partition("=")[2])["model"] == "modelmill/it's"
    assert program == "opencode"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "a:1", "--model", "m"), "is no http:// or https:// address"),
        ((), "no server is running"),
    ],
)
def test_mistakes_of_launch(
    words: tuple[str, ...], message: str, cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    code, _, err = cli("launch", "claude", *words)
    assert code == 2
    assert message in err


def test_an_agent_that_is_not_installed(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = cli("launch", "claude", "--url", "http://a", "--model", "m", "--run")
    assert (code, err) == (1, "modelmill: there is no claude on the PATH; install it first\n")

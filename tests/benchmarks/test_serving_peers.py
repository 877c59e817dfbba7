"""Server beside server: the loads, the commands and the order of the sides, without processes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving_peers
from benchmarks.peer_setup import PeerSetup
from modelmill.core.errors import ModelmillError
from modelmill.eval.serving_load import ServingLoad


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    trace = tmp_path / "trace.csv"
    lines = [f"{10 + i},{5 + i}" for i in range(300)]
    trace.write_text("\n".join(["ContextTokens,GeneratedTokens", *lines]))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    return serving_peers.parse_args([
        "--tokenizer", str(tokenizer), "--vllm-python", "/venv/bin/python", "--trace", str(trace),
        "--rate", "2,16", "--concurrency", "1,64", "--work", str(tmp_path / "work"),
    ])  # fmt: skip


class FakeServer:
    """A server whose measurements are counted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def measure(self, load: ServingLoad) -> dict[str, Any]:
        return {"requests": len(load.lengths)}

    def versions(self) -> dict[str, str]:
        return {} if self.name == "modelmill" else {"vllm": "1.2"}


def test_each_load_has_prompts_of_its_own(options: argparse.Namespace) -> None:
    made = list(serving_peers.loads(options))
    assert [(each.name, len(each.load.lengths)) for each in made] == [
        ("rate-2", 40), ("rate-16", 300), ("closed-1", 10), ("closed-64", 256)
    ]  # fmt: skip
    assert len({each.load.seed for each in made}) == len(made)
    assert [each.load.rate for each in made] == [2, 16, None, None]
    assert [each.load.concurrency for each in made] == [None, None, 1, 64]


def test_the_sides_change_places(options: argparse.Namespace) -> None:
    servers: Any = [FakeServer("vLLM"), FakeServer("modelmill")]
    facts = {"commit": "abc", "versions": {"torch": "2"}}
    made = list(serving_peers.rows(options, servers, facts))
    order = [(row["work"], row["subject"]) for row in made]
    assert order[:4] == [
        ("rate-2", "vLLM"), ("rate-2", "modelmill"), ("rate-16", "modelmill"), ("rate-16", "vLLM")
    ]  # fmt: skip
    assert {row["commit"] for row in made} == {"abc"}
    assert made[0]["versions"] == {"torch": "2", "vllm": "1.2"}, "a claim names the peer's version"
    assert made[1]["versions"] == {"torch": "2"}
    assert len({row["run"] for row in made}) == 1


def test_a_peer_tells_its_version() -> None:
    class Client:
        async def get(self, path: str) -> dict[str, str]:
            assert path == "/version"
            return {"version": "0.25.1"}

    server: Any = object.__new__(serving_peers.PeerServer)
    server.name, server.client = "vLLM", Client()
    assert server.versions() == {"vllm": "0.25.1"}
    server.name = "modelmill"
    assert server.versions() == {}


def test_both_serve_one_checkpoint_alike(
    options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, tuple[list[str], dict[str, str]]] = {}

    def server(name: str, command: list[str], _port: int, _log: Path, env: dict[str, str]) -> str:
        started[name] = (command, env)
        return name

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    monkeypatch.setattr(serving_peers, "PeerServer", server)
    monkeypatch.setattr(PeerSetup, "checkpoint", lambda self, shape: checkpoint)
    monkeypatch.setattr(PeerSetup, "engine", lambda self, shape: tmp_path / "x.engine")
    setup = PeerSetup(options.work, None, options.vllm_python)
    assert list(serving_peers.start_servers(options, setup)) == ["vLLM", "modelmill"]
    assert (checkpoint / "tokenizer.json").exists()
    (vllm, env), (modelmill, _) = started["vLLM"], started["modelmill"]
    assert vllm[0] == "/venv/bin/python"
    assert str(checkpoint) in vllm
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env, "its server chooses its processes"
    for flag in ("--gpu-memory-utilization", "--max-model-len", "--served-model-name"):
        assert vllm[vllm.index(flag) + 1] == modelmill[modelmill.index(flag) + 1]


def test_a_server_that_ends_is_an_error(tmp_path: Path) -> None:
    import sys

    from modelmill.core.errors import ModelmillError

    server = serving_peers.PeerServer(
        "vLLM", [sys.executable, "-c", ""], serving_peers.free_port(), tmp_path / "x.log", {}
    )
    with pytest.raises(ModelmillError, match="vLLM does not serve"):
        server.wait(30)
    server.close()


def test_a_wrong_folder_and_missing_packages_are_seen_first(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving_peers.parse_args(["--tokenizer", "no-such-folder"])
    assert "no tokenizer.json in 'no-such-folder'" in capsys.readouterr().err
    monkeypatch.setattr(serving_peers, "parse_args", lambda: options)
    monkeypatch.setattr(serving_peers, "SERVER_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match="modelmill serve needs no_such_package; install"):
        serving_peers.main()


def test_a_server_that_ends_shows_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first'); raise SystemExit('no memory for pages')"]
    server = serving_peers.PeerServer("vLLM", command, 1, tmp_path / "log", dict(os.environ))
    with pytest.raises(ModelmillError, match=r"vLLM does not serve: .*\nfirst\nno memory"):
        server.wait(30)
    server.close()

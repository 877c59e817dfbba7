"""``modelmill serve --models-dir`` with worker processes and a budget that holds one model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli.launch import served_context_length
from modelmill.serve.catalogue.entries import read_manifest
from tests.serve.dialect_calls import MODEL
from tests.serve.server_process import FLAGS, ServerProcess
from tests.wait import wait_until

KV_BYTES = 8_000_000
MAX_MODEL_LEN = 256
"""Lower than the engines' own 512."""
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def models_dir(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine ``stories`` under two names."""
    folder = tmp_path_factory.mktemp("models")
    (folder / f"{MODEL}.engine").symlink_to(stories)
    (folder / "other").symlink_to(stories)
    return folder


@pytest.fixture(scope="module")
def server(models_dir: Path, stories: Path) -> Iterator[ServerProcess]:
    """A server of both."""
    budget = read_manifest(stories).weight_bytes * 3 // 2 + KV_BYTES
    words = ("--models-dir", models_dir, "--memory-budget", budget, "--log-level", "info")
    words = (*words, "--max-model-len", MAX_MODEL_LEN, "--parse-special")
    with ServerProcess(*words, flags=FLAGS) as serving:
        yield serving


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.request("/v1/models")[1]["data"]}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/completion": {"prompt": "Hi", "n_predict": 2},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 2}},
    "/api/embed": {"input": "Hi"},
}


def check_keep_alive(server: ServerProcess, model: str) -> None:
    """Every dialect takes it."""
    for path, body in BODIES.items():
        status, answer, _ = server.request(path, {"model": model, "keep_alive": "1h", **body})
        assert status == 200, (path, answer)


def context_lengths(server: ServerProcess, model: str) -> set[Any]:
    """What every list and description says of a model's context."""
    cards = server.request("/v1/models")[1]
    (card,) = (each for each in cards["data"] if each["id"] == model)
    shown = server.request("/api/show", {"model": model})[1]["model_info"]
    return {
        card["max_model_len"],
        served_context_length(cards, model),
        server.request(f"/v1/models/{model}")[1]["max_model_len"],
        shown["llama.context_length"],
    }


def check_context_of_an_unloaded_model(server: ServerProcess, model: str) -> None:
    assert states(server)[model] == "unloaded"
    assert context_lengths(server, model) == {MAX_MODEL_LEN}


def check_special_tokens_are_read(server: ServerProcess, model: str) -> None:
    """By default, since the server has ``--parse-special``."""
    counts = [
        server.request("/tokenize", {"model": model, "prompt": "a</s>", **more})[1]["count"]
        for more in ({}, {"parse_special": True}, {"parse_special": False})
    ]
    assert counts[0] == counts[1] < counts[2]


def test_the_context_is_known_before_a_model_is_loaded(server: ServerProcess) -> None:
    check_context_of_an_unloaded_model(server, "other")
    server.request("/v1/completions", {"model": "other", "prompt": "Hi", "max_tokens": 1})
    assert states(server)["other"] == "loaded"
    assert context_lengths(server, "other") == {MAX_MODEL_LEN}
    server.request("/api/generate", {"model": "other", "stream": False, "keep_alive": 0})


def test_the_server_reads_special_tokens_by_default(server: ServerProcess) -> None:
    check_special_tokens_are_read(server, MODEL)
    server.request("/api/generate", {"model": MODEL, "stream": False, "keep_alive": 0})


def test_every_dialect_takes_keep_alive_and_loads_the_model(server: ServerProcess) -> None:
    assert set(states(server).values()) == {"unloaded"}
    check_keep_alive(server, MODEL)
    assert states(server) == {MODEL: "loaded", "other": "unloaded"}
    (running,) = server.request("/api/ps")[1]["models"]
    assert running["name"] == MODEL
    assert not running["expires_at"].startswith("9999")


def test_ollama_lists_shows_and_unloads_without_loading(server: ServerProcess) -> None:
    assert {each["name"] for each in server.request("/api/tags")[1]["models"]} == {MODEL, "other"}
    shown = server.request("/api/show", {"model": "other"})[1]
    assert shown["model_info"]["llama.context_length"] == MAX_MODEL_LEN
    assert states(server)["other"] == "unloaded"
    assert server.request("/api/generate", {"model": "other", "stream": False})[1]["done"]
    assert states(server) == {MODEL: "unloaded", "other": "loaded"}
    body = {"model": "other", "stream": False, "keep_alive": 0}
    assert server.request("/api/generate", body)[1]["done_reason"] == "unload"
    assert states(server)["other"] == "unloaded"
    assert server.request("/api/ps")[1]["models"] == []


def test_a_killed_worker_is_replaced_for_the_next_request(server: ServerProcess) -> None:
    assert server.request("/v1/completions", {"model": MODEL, "prompt": "Hi"})[0] == 200
    for worker in server.workers:  # also the one that is kept ready
        worker.send_signal(signal.SIGKILL)
    wait_until(lambda: any(each["restarts"] for each in server.wait(200)["engines"]))
    status, answer, _ = server.request("/v1/completions", {"model": MODEL, "prompt": "Hi"})
    assert status == 200, answer


def test_what_flags_must_not_say(
    cli: Callable[..., tuple[int, str, str]], models_dir: Path
) -> None:
    for words, message in (
        (("--memory-budget", 5, models_dir / "other"), "--memory-budget is for --models-dir"),
        (("--models-dir", models_dir, "--memory-budget", 0), "must be at least 1, not 0"),
        (("--sleep-memory", 5, models_dir / "other"), "--sleep-memory is for --models-dir"),
        (("--models-dir", models_dir, "--sleep-memory", 0), "--sleep-memory must be at least 1"),
        (("--models-dir", models_dir, "--keep-alive", "x"), "--keep-alive must be seconds"),
        (("--models-dir", models_dir, "--api-key", "k", "--admin-key", "k"), "of two kinds"),
        (("--models-dir", models_dir, "--admin-key", " "), "an admin key must be printable"),
        (("--models-dir", models_dir, "--admin-key-file", models_dir / "no"), "cannot be read"),
        (("--models-dir", models_dir, "--keys", models_dir / "no"), "cannot be read"),
        (("--models-dir", models_dir, "--session-bytes", 0), "--session-bytes must be at least 1"),
        (
            ("--models-dir", models_dir, "--ray"),
            "--ray serves engines that stay loaded: each replica would load",
        ),
        (("--models-dir", models_dir, models_dir / "other"), "would be served as other"),
        (("--models-dir", models_dir, "--served-model-name", "x"), "use a catalogue's names"),
    ):
        code, _, err = cli("serve", "--port", 0, "--device", "cpu", *words)
        assert (code, message in err) == (2, True), err

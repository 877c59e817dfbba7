"""The tool that runs llama.cpp's server tests: options, reasons, counts, a run, the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.peer_server_tests import __main__ as command
from tools.peer_server_tests import page
from tools.peer_server_tests import results as results_file
from tools.peer_server_tests.reasons import REASONS, Group, find_reason
from tools.peer_server_tests.results import count
from tools.peer_server_tests.run_tests import TESTS, run_tests
from tools.peer_server_tests.server_options import (
    UNAVAILABLE_OPTIONS,
    missing_feature,
    serve_flags,
    served_names,
    with_defaults,
)

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared/data/models/stories260K"
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(UNAVAILABLE_OPTIONS),
    **dict.fromkeys(("pooling", "reasoning", "chat_template", "chat_template_file", "api_key")),
    **{"cors_origins": None, "model_hf_file": None, "model_alias": "a,b", "kv_unified": False},
    **{"model_hf_repo": "ggml-org/test-model-stories260K", "server_host": "127.0.0.1"},
    **{"n_ctx": 512, "n_slots": 2, "n_batch": 32, "n_predict": 8, "temperature": 0.8, "seed": 42},
}
UTILS = """
import requests

class ServerError(Exception):
    pass

class ServerProcess:
    server_port = 0
    def start(self):
        raise RuntimeError("llama.cpp's server")
    def stop(self):
        raise RuntimeError("llama.cpp's server")
    def make_request(self, method, path, data=None):
        url = f"http://127.0.0.1:{self.server_port}{path}"
        answer = requests.request(method, url, json=data)
        answer.body = answer.json()
        return answer
    def make_stream_request(self, method, path, data=None):
        yield from ()
"""
PEER_TESTS = """
import pytest
from utils import *

@pytest.fixture
def server():
    server = ServerProcess()
    for name, value in OPTIONS.items():
        setattr(server, name, value)
    return server

def test_completion(server):
    server.start()
    res = server.make_request("POST", "/completion", data={"prompt": "Once"})
    assert res.body["tokens_predicted"] == 8
    assert res.headers["Content-Type"] and "server" not in res.headers

def test_any_name_of_a_model(server):
    server.start()
    data = {"model": "gpt-4.1", "prompt": "Once"}
    assert server.make_request("POST", "/v1/completions", data=data).status_code == 200

def test_slots(server):
    server.start()
    assert server.make_request("GET", "/slots").status_code == 200

def test_lora(server):
    server.lora_files = ["a"]
    server.start()

@pytest.mark.skip(reason="of llama.cpp")
def test_skipped():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


def _server(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, ""),
        ({"lora_files": ["a"]}, "LoRA adapters"),
        ({"pooling": "none"}, "each token"),
        ({"reasoning": "off"}, "never thinks"),
        ({"chat_template": "llama3"}, "part of llama.cpp"),
        ({"chat_template": "This is {{ one }}"}, ""),
        ({"server_host": "127.0.0.1,::1"}, "several addresses"),
        ({"model_hf_repo": None}, "a router"),
        ({"model_hf_repo": None, "cors_origins": "localhost"}, ""),
        ({"model_hf_repo": "org/other"}, "another model (org/other)"),
        ({"model_hf_file": "split/a.gguf"}, "another model"),
    ],
)
def test_what_a_server_of_llama_cpp_needs(options: dict[str, Any], needs: str) -> None:
    assert needs in missing_feature(_server(**options))
    assert bool(missing_feature(_server(**options))) == bool(needs)


def test_options_become_flags_and_fields_of_requests(tmp_path: Path) -> None:
    flags = " ".join(serve_flags(_server(api_key="k"), tmp_path))
    assert "--max-model-len 256 --max-num-seqs 2 --max-num-batched-tokens 32 --api-key k" in flags
    assert "--max-model-len 512" in " ".join(serve_flags(_server(kv_unified=True), tmp_path))
    assert Path(flags.rpartition(" ")[2]).read_text("utf-8").startswith("{{ bos_token }}")
    own = serve_flags(_server(chat_template="One {{ a }}"), tmp_path)[-1]
    assert Path(own).read_text("utf-8") == "One {{ a }}"
    file = serve_flags(_server(chat_template_file="x.jinja"), tmp_path)[-1]
    assert Path(file) == Path("x.jinja").resolve()
    assert served_names(_server()) == ("a", "b")
    made = with_defaults(_server(), "/completion", {"prompt": "a", "seed": 1})
    assert made == {"prompt": "a", "seed": 1, "temperature": 0.8, "n_predict": 8}
    assert "n_predict" not in with_defaults(_server(), "/v1/completions", {"max_tokens": 2})
    assert with_defaults(_server(), "/tokenize", {"content": "a"}) == {"content": "a"}


def test_a_failed_test_has_the_first_reason_that_holds() -> None:
    line = {"message": "assert False", "line": "assert match_regex(a, b)", "answer": ""}
    reason = find_reason("unit/test_a.py::test_b[match]", line)
    assert reason is not None
    assert reason.group is Group.ANSWERS
    assert find_reason("unit/test_a.py::test_b", {"message": "assert 1 == 2"}) is None
    # the values of a test's parameters say nothing of the failure
    assert find_reason("unit/test_a.py::test_b[GET /slots]", {"message": "assert 1 == 2"}) is None


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/data/models/stories260K")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("utils.py", UTILS + f"\nOPTIONS = {OPTIONS!r}\n"),
        ("unit/test_one.py", PEER_TESTS),
    ):
        path = tmp_path / TESTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    outcomes = run_tests(tmp_path, STORIES)
    by_name = {test.partition("::")[2]: each for test, each in outcomes.items()}
    assert {name: each["outcome"] for name, each in by_name.items()} == {
        "test_completion": "passed",
        "test_any_name_of_a_model": "passed",
        "test_slots": "failed",
        "test_lora": "not applicable",
        "test_skipped": "skipped",
    }, outcomes
    assert "GET /slots: 404" in by_name["test_slots"]["answer"]
    results = count("abc", outcomes)
    assert results.features == {"LoRA adapters": 1}
    assert not results.unexplained
    assert list(results.files) == ["test_one.py"]
    command.print_failures(outcomes)
    assert "private to llama.cpp: `/slots`" in capsys.readouterr().out


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), "--commit", "a"]) == 2
    assert "name a checkout of llama.cpp" in capsys.readouterr().err
    (tmp_path / TESTS).mkdir(parents=True)
    (tmp_path / TESTS / "utils.py").touch()
    assert command.main([str(tmp_path), "--commit", "a", "--model", str(tmp_path)]) == 2
    assert "name a checkpoint" in capsys.readouterr().err


def test_the_page_is_what_the_results_give() -> None:
    assert page.main(["--check"]) == 0, "run `make llama-cpp-tests` and commit what it writes"
    results = results_file.load(ROOT)
    assert not results.unexplained
    assert set(results.reasons) <= {each.text for each in REASONS}
    assert results.total("failed") == sum(results.reasons.values())


def test_results_are_kept(tmp_path: Path) -> None:
    results = results_file.load(ROOT)
    (tmp_path / results_file.FILE).parent.mkdir(parents=True)
    results_file.save(tmp_path, results)
    text = (tmp_path / results_file.FILE).read_text("utf-8")
    assert json.loads(text) == dataclasses.asdict(results)
    assert page.render(tmp_path) == page.render(ROOT)

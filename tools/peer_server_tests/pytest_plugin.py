"""pytest's plugin of a run: our server in the place of llama.cpp's, and outcomes in a file."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tools.peer_server_tests.server_process import (
    NOT_APPLICABLE,
    RunningServer,
    replace_server_process,
)

ENGINE_KEY, OUTPUT_KEY = "PEER_SERVER_ENGINE", "PEER_SERVER_OUTPUT"
_COUNTS = re.compile(r"_n\b|n_\w|cache|tokens|metrics")
_UNKNOWN_MODEL = re.compile(r"there is no model '([\w.-]+)' here")
_outcomes: dict[str, dict[str, str]] = {}
_answers: list[tuple[str, str, int, Any]] = []
_engine = Path(os.environ.get(ENGINE_KEY, ""))
_running = RunningServer(_engine, _engine.parent)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what starts servers, and what loads files, before the tests are imported."""
    wget = types.ModuleType("wget")
    wget.download = _download  # type: ignore[attr-defined]
    sys.modules["wget"] = wget
    replace_server_process(importlib.import_module("utils"), _running, _answers)


def _download(*_: Any, **__: Any) -> None:
    pytest.skip(NOT_APPLICABLE + "a file of the network")


def pytest_configure(config: pytest.Config) -> None:
    """Declare llama.cpp's marks."""
    config.addinivalue_line("markers", "slow: needs large models")
    config.addinivalue_line("markers", "serial: runs alone")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again if another server might let it pass.

    llama.cpp's server answers to any model's name: a name that a file of tests asks for becomes one
    of the served. A server that answered other tests counts and caches what they asked.
    """
    if item.path != _running.file:
        _running.file, _running.more_names = item.path, ()
    reports = _run(item, nextitem)
    if name := _unknown_model(_outcome(reports)):
        _running.more_names += (name,)
        reports = _run(item, nextitem)
    outcome = _outcome(reports)
    if _running.is_reused and _COUNTS.search(outcome.get("line", "") + outcome["message"]):
        _running.close()
        reports = _run(item, nextitem)
    _outcomes[item.nodeid] = _outcome(reports)
    _write_outcomes()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


def _run(item: pytest.Item, nextitem: pytest.Item | None) -> list[Any]:
    from _pytest.runner import runtestprotocol

    _answers.clear()
    _running.is_reused = False
    item._initrequest()  # type: ignore[attr-defined]
    return runtestprotocol(item, nextitem=nextitem, log=False)


def _unknown_model(outcome: dict[str, str]) -> str:
    match = _UNKNOWN_MODEL.search(outcome["message"] + outcome.get("answer", ""))
    return match[1] if match else ""


def _outcome(reports: list[Any]) -> dict[str, str]:
    """What became of a test: outcome, message, the failed line and the last refused request."""
    for report in reports:
        if report.outcome == "failed":
            return {"outcome": "failed", **_failure(report)}
        if report.outcome == "skipped":
            text = report.longrepr[2].removeprefix("Skipped: ")
            applicable = not text.startswith(NOT_APPLICABLE)
            outcome = "skipped" if applicable else "not applicable"
            return {"outcome": outcome, "message": text.removeprefix(NOT_APPLICABLE)}
    return {"outcome": "passed", "message": ""}


def _failure(report: Any) -> dict[str, str]:
    crash = getattr(report.longrepr, "reprcrash", None)
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    lines = [line.strip() for each in entries[:1] for line in each.lines if line[:1] != "E"]
    refused = [each for each in _answers if each[2] >= 400]
    answer = ""
    if refused:
        method, path, status, body = refused[-1]
        answer = f"{method} {path}: {status} {json.dumps(body)[:400]}"
    message = str(getattr(crash, "message", report.longrepr)).splitlines() or [""]
    # the statement of the test, not one of a helper; the last line underlines a part of it
    lines = [line for line in lines if line.strip("^~ ")]
    return {"message": message[0][:300], "line": " ".join(lines)[:300], "answer": answer}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _outcomes[report.nodeid] = {"outcome": "not collected", "message": str(report.longrepr)}


def pytest_sessionfinish() -> None:
    """End the server and write the outcomes."""
    _running.close()
    _write_outcomes()


def _write_outcomes() -> None:
    Path(os.environ[OUTPUT_KEY]).write_text(json.dumps(_outcomes, indent=1), "utf-8")

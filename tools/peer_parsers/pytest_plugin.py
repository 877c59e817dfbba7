"""pytest's plugin of a run: the peer's modules are replaced, and outcomes are written to a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools.peer_parsers.asked_answers import ASKED
from tools.peer_parsers.delta_delivery import DELIVERY
from tools.peer_parsers.peer_modules import PeerModules
from tools.peer_parsers.peer_parser import PeerInternalError

ROOT_KEY, SOURCE_KEY, OUTPUT_KEY = "PEER_ROOT", "PEER_SOURCE", "PEER_OUTPUT"
_LACKS = (
    r"does not have the attribute|object '\w+Parser' has no|Mock object has no|but got 'Internal'"
    r"|X is not a type object"
)
_outcomes: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the modules before any file of the tests is imported."""
    PeerModules(Path(os.environ[SOURCE_KEY]), os.environ[ROOT_KEY]).install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test until it passes in one of the ways to receive deltas."""
    from _pytest.runner import runtestprotocol

    outcomes, reports = list[dict[str, Any]](), list[Any]()
    for _ in DELIVERY.ways():
        if outcomes:
            item._initrequest()  # type: ignore[attr-defined]
        ASKED.clear()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        outcomes.append({**_outcome(reports), "asked": [asdict(each) for each in ASKED]})
        if outcomes[-1]["outcome"] != "failed":
            break
    passed = outcomes[-1]["outcome"] != "failed"
    outcome = outcomes[-1] if passed else outcomes[0]
    if passed and not outcome["asked"] and outcome["outcome"] in ("passed", "xpassed"):
        outcome |= {"outcome": "internal", "message": "it asks no parser"}
    _outcomes[item.nodeid] = outcome
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Mark a report whose test needs something internal."""
    report = yield
    if call.excinfo is not None and _is_internal(call.excinfo.value):
        report.internal = True
    return report


def _is_internal(error: BaseException | None) -> bool:
    while error is not None:
        # a mock of something that the adapter lacks
        if isinstance(error, PeerInternalError) or re.search(_LACKS, str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _outcome(reports: list[Any]) -> dict[str, str]:
    """One outcome of a test's three reports."""
    for report in reports:
        if getattr(report, "internal", False):
            return {"outcome": "internal", "message": _last_line(report)}
        if report.outcome == "failed":
            text = str(report.longrepr)
            if "XPASS(strict)" in text:
                return {"outcome": "xpassed", "message": ""}
            return {"outcome": "failed", "message": _last_line(report)}
        if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
            return {"outcome": "skipped", "message": _last_line(report)}
        if hasattr(report, "wasxfail"):
            passed = report.outcome == "passed"
            return {"outcome": "xpassed" if passed else "xfailed", "message": str(report.wasxfail)}
    return {"outcome": "passed", "message": ""}


def _last_line(report: Any) -> str:
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    return (crash or str(report.longrepr))[:300]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _outcomes[report.nodeid] = {
            "outcome": "not collected",
            "message": _last_line(report),
            "asked": [],
        }


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ[OUTPUT_KEY]).write_text(json.dumps(_outcomes, indent=0), "utf-8")

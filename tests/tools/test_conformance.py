"""The logic of `make conformance` itself: what is kept, what is run again, what the page says, how
it exits.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.conformance import __main__ as conformance
from tools.conformance import (
    compat_canary,
    llm_comply,
    openapi_schema,
    report,
    suite,
    text_equality,
)
from tools.conformance.suite import FailedCheck, SuiteResult


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Two suites in place of the real ones, no server, and a page of their own."""
    runs: list[str] = []

    def make(name: str, result: Any) -> Any:
        def run(base_url: str, model: str, out: Path) -> SuiteResult:
            assert (base_url, model) == ("http://x/v1", "m")
            assert out.is_dir()
            runs.append(name)
            if isinstance(result, Exception):
                raise result
            return SuiteResult(
                **json.loads(json.dumps(result))
                | {"failed": [FailedCheck(*each) for each in result["failed"]]}
            )

        source = tmp_path / f"{name}.py"
        source.write_text("")
        return SimpleNamespace(
            TITLE=f"Suite {name}", PACKAGE="pytest", run=run, __file__=str(source)
        )

    package = tmp_path / "modelmill"
    package.mkdir()
    fake_suites = {name: make(name, {"passed": 2, "failed": []}) for name in ("one", "two")}
    monkeypatch.setattr(conformance, "find_suites", lambda: fake_suites)
    monkeypatch.setattr(conformance, "PACKAGE", package)
    monkeypatch.setattr(conformance, "DOCUMENT", tmp_path / "conformance.md")
    return SimpleNamespace(
        runs=runs, by_name=fake_suites, make=make, root=tmp_path, package=package
    )


def run(suites: Any, *argv: str) -> int:
    return conformance.main(
        ["--out", str(suites.root / "out"), "--url", "http://x/v1", "--model", "m", *argv]
    )


def page(suites: Any) -> str:
    return (suites.root / "conformance.md").read_text()


def test_results_are_kept_until_the_sources_change(suites: Any) -> None:
    assert run(suites) == 0
    assert run(suites) == 0
    assert suites.runs == ["one", "two"]
    (suites.package / "new.py").write_text("x = 1")
    assert run(suites, "--only", "two") == 0
    assert suites.runs == ["one", "two", "two"]
    (row,) = [line for line in page(suites).splitlines() if line.startswith("| [one]")]
    assert "| 2 | 0 | 0 |" in row
    assert "(of older sources)" in row
    assert run(suites) == 0
    assert suites.runs[3:] == ["one"]
    assert "older sources" not in page(suites).split("## one")[0].split("| suite |")[1]
    assert run(suites, "--only", "one", "--force") == 0
    assert suites.runs[4:] == ["one"]


def test_a_failure_is_named_run_again_and_ends_with_1(suites: Any) -> None:
    suites.by_name["two"] = suites.make(
        "two", {"passed": 1, "failed": [("a | check", "saw\nthis")]}
    )
    assert run(suites) == 1
    assert "| a \\| check | saw this |" in page(suites)
    assert "| **1** |" in page(suites)
    assert run(suites) == 1
    assert suites.runs == ["one", "two", "two"], "what has failed is not kept"


def test_a_suite_that_cannot_run_is_a_failure(suites: Any) -> None:
    suites.by_name["one"] = suites.make("one", RuntimeError("no node\nhere"))
    assert run(suites) == 1
    assert "| runs to its end | RuntimeError: no node |" in page(suites)
    assert suites.runs == ["one", "two"], "the others run all the same"


def test_what_has_not_run_is_said(suites: Any) -> None:
    assert run(suites, "--only", "one") == 0
    assert "| two | Suite two | | not run | | | |" in page(suites)
    assert run(suites, "--only", "three") == 2


def test_what_ran_elsewhere_stays_on_the_page(suites: Any) -> None:
    """In a new checkout, which has the page and no stored results."""
    assert run(suites) == 0
    for path in (suites.root / "out").glob("*.json"):
        path.unlink()
    for _ in range(2):
        assert run(suites, "--only", "two") == 0
        (row,) = [line for line in page(suites).splitlines() if line.startswith("| [one]")]
        assert "| 2 | 0 | 0 |" in row
        assert row.count("(of older sources)") == 1
        assert page(suites).count("## one") == 1


def test_nothing_checked_is_not_green() -> None:
    assert not SuiteResult(0).ok
    assert SuiteResult(1).ok
    assert not SuiteResult(5, [FailedCheck("a", "b")]).ok


def test_the_real_suites_have_what_is_asked_of_them() -> None:
    suites = conformance.find_suites()
    assert {"openai_client", "llm_comply", "compat_canary", "openapi_schema"} <= suites.keys()
    for module in suites.values():
        assert module.TITLE
        assert module.PACKAGE
        assert module.__doc__


def test_results_survive_their_file(tmp_path: Path) -> None:
    result = SuiteResult(
        3, [FailedCheck("a", "ü")], [FailedCheck("b", "c")], {"d": "e"}, ["f"], "1", digest="x"
    )
    suite.store(result, tmp_path / "r.json")
    assert suite.load(tmp_path / "r.json") == result
    assert suite.load(tmp_path / "r.json", "x") == result
    assert suite.load(tmp_path / "r.json", "y") is None
    (tmp_path / "r.json").write_text("{}")
    assert suite.load(tmp_path / "r.json") is None


def test_cases_of_a_schemathesis_report() -> None:
    def event(checks: list[Any], status: int | None) -> str:
        answer = {} if status is None else {"response": {"status_code": status}}
        recorder = {
            "label": "GET /x",
            "cases": {"c": {}},
            "checks": {"c": checks},
            "interactions": {"c": answer},
        }
        return json.dumps({"ScenarioFinished": {"recorder": recorder}})

    good = {"name": "no_5xx", "status": "success"}
    bad = {
        "name": "fits",
        "status": "failure",
        "failure_info": {"failure": {"message": "it\ndoes not"}},
    }
    lines = [
        json.dumps({"PhaseStarted": {}}),
        event([good], 200),
        event([good, bad], 500),
        event([good], None),
    ]
    result = openapi_schema.read_report(lines)
    assert result.passed == 1
    assert [case.name for case in result.failed] == [
        "GET /x: fits",
        "GET /x: an answer",
        "enough cases",
    ]
    assert "does not" in result.failed[0].reason
    assert result.facts["statuses"] == "200: 1, 500: 1, None: 1"


@pytest.mark.parametrize(
    ("response", "num_notes"),
    [({"error": {"code": "not_found"}}, 1), ({"error": None}, 0), ("", 0)],
)
def test_a_pass_on_a_path_that_is_not_served_is_noted(response: Any, num_notes: int) -> None:
    result = SuiteResult(0)
    each = SimpleNamespace(
        status=SimpleNamespace(value="passed"), response=response, warnings=[], errors=[]
    )
    llm_comply._collect(result, "open-responses: compact-response", each)
    assert result.passed == 1
    assert len(result.notes) == num_notes


def test_every_way_of_asking_begins_with_no_prefix_known(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, bool]] = []

    def answer(_: str, body: dict[str, Any]) -> str:
        requests.append((body["cache_salt"], body["stream"]))
        return (
            "other"
            if body["cache_salt"] == "HTTP, streamed" and body["messages"] == "b"
            else "text"
        )

    text = SimpleNamespace(outputs=[SimpleNamespace(text="text")])
    llm = SimpleNamespace(
        chat=lambda messages, *_, **__: (
            [text] * (len(messages) if isinstance(messages, list) else 1)
        )
    )
    monkeypatch.setattr(text_equality, "_answer_text", answer)
    monkeypatch.setattr(
        "modelmill.llm.LLM", lambda *_, **__: SimpleNamespace(chat=llm.chat, close=lambda: None)
    )
    equal = text_equality.measure(
        "http://x/v1", "m", Path("e"), [{"messages": "a"}, {"messages": "b"}]
    )
    assert equal == {**dict.fromkeys(text_equality.REQUEST_MODES, 2), "HTTP, streamed": 1}
    assert dict(requests) == {way: "streamed" in way for way in text_equality.REQUEST_MODES[:4]}


def test_a_canary_that_warns_has_not_passed() -> None:
    results = [
        {"id": str(i), "status": s, "summary": "x"} for i, s in enumerate(("pass", "warn", "fail"))
    ]
    result = compat_canary.read_report({"results": results, "score": 50})
    assert (result.passed, [case.name for case in result.failed]) == (1, ["1", "2"])


def test_steering_keeps_what_is_wrong_wrong() -> None:
    pytest.importorskip("schemathesis")
    from tools.conformance._schemathesis_hooks import drop_exclusive_fields, set_model_and_limits

    body: dict[str, Any] = {"model": 3, "max_tokens": -1, "n": 500}
    set_model_and_limits(body, "/v1/completions", "m")
    assert body == {"model": 3, "max_tokens": -1, "n": 500}
    body = {"model": "x", "max_tokens": 900, "n": 9, "logprobs": 3, "tools": []}
    drop_exclusive_fields(body, "/v1/completions")
    set_model_and_limits(body, "/v1/completions", "m")
    assert body == {"model": "m", "max_tokens": 2, "n": 2, "prompt": "A fruit is"}
    # without a limit an answer fills the context, which takes longer than a request may
    for n_predict, limit in ((-1, 2), (None, 2), (-2, -2), (1, 1)):
        body = {"prompt": "a", "n_predict": n_predict}
        set_model_and_limits(body, "/completion", "m")
        assert body["n_predict"] == limit
    for options, limited in (
        ({}, {"num_predict": 2}),
        ({"num_predict": -1.0}, {"num_predict": -1.0}),
        (3, 3),
    ):
        body = {"options": options}
        set_model_and_limits(body, "/api/chat", "m")
        assert body == {"options": limited}


def test_the_page_is_a_table() -> None:
    text = report.render(
        {"a": ("What a does", SuiteResult(1, version="2", package="p", date="today", commit="c"))},
        "one core",
    )
    assert "| [a](#a) | What a does | p 2 | 1 | 0 | 0 | today |" in text
    assert "## a" in text
    assert "`python -m tools.conformance --only a`: 0 s on one core, today; commit c, p 2" in text


def test_a_sampled_answer_that_fills_the_context_is_asked_for_again() -> None:
    def result(*errors: str) -> SimpleNamespace:
        return SimpleNamespace(id="streaming", errors=list(errors))

    second, notes = result(), list[str]()
    runner = SimpleNamespace(run_all=lambda: SimpleNamespace(results=[second]))
    other = result("no output")
    assert llm_comply._asked_again(other, runner, notes) is other
    assert notes == []
    assert llm_comply._asked_again(result(llm_comply.RAMBLED), runner, notes) is second
    assert len(notes) == 1

"""LangChain's standard integration tests for chat models, with ChatOpenAI pointed at the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = "langchain-tests: ChatModelIntegrationTests with langchain-openai's ChatOpenAI"
PACKAGE = "langchain-tests"
TESTS = Path(__file__).with_name("_langchain_tests.py")
NO_IMAGES_REASON = "SmolLM2 reads text only"
OTHER_API_REASON = "content in the form of another maker's API, which OpenAI's has not"
REASONS = {
    "test_image_inputs": NO_IMAGES_REASON,
    "test_image_tool_message": NO_IMAGES_REASON,
    "test_pdf_inputs": NO_IMAGES_REASON,
    "test_pdf_tool_message": NO_IMAGES_REASON,
    "test_audio_inputs": NO_IMAGES_REASON,
    "test_anthropic_inputs": OTHER_API_REASON,
    "test_stream_time": "a benchmark that replays recorded answers of the maker's API; there are "
    "none",
}
"""Why a test is left out that LangChain itself skips for a class that does not declare what it
needs.
"""
EVENT_LOOP_SCOPE = (
    # langchain-openai keeps its connections from one test to the next, so their loop must stay
    "session"
)


def run(base_url: str, model: str, out: Path) -> SuiteResult:
    """A pytest run of its own, read from its JUnit file."""
    report = out / "junit.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", str(TESTS), "--rootdir", str(TESTS.parent), "-c",
        os.devnull, "-q", "-rx",
        "-p", "no:cacheprovider", "--junitxml", str(report), "-o", "asyncio_mode=auto",
        "-o", f"asyncio_default_test_loop_scope={EVENT_LOOP_SCOPE}",
        "-o", f"asyncio_default_fixture_loop_scope={EVENT_LOOP_SCOPE}",
    ]  # fmt: skip
    where = {"MODELMILL_TEST_URL": base_url, "MODELMILL_TEST_MODEL": model}
    with (out / "pytest.log").open("w") as log:
        # no reports to langsmith
        environment = {**os.environ, **where, "LANGSMITH_TRACING": "false"}
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
    if not report.is_file():
        raise RuntimeError(
            f"pytest ended with {done.returncode} and without a report; see {out / 'pytest.log'}"
        )
    result = read_junit(report)
    result.facts["declared as supported"] = (
        "tool calling, forced tool choice, structured output, JSON mode, streaming, usage, "
        "another model per call"
    )
    return result


def read_junit(report: Path) -> SuiteResult:
    """Read a JUnit file."""
    result = SuiteResult(0)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        problem = next(
            (each for tag in ("failure", "error") if (each := case.find(tag)) is not None), None
        )
        skipped = case.find("skipped")
        if problem is not None:
            result.failed.append(
                FailedCheck(name, " ".join((problem.get("message") or "").split())[:300])
            )
        elif skipped is not None:
            message = " ".join((skipped.get("message") or "").split())
            expected = "xfail" in (skipped.get("type") or "")
            reason = message if expected else REASONS.get(name.split("[")[0])
            if reason is None:
                result.failed.append(
                    FailedCheck(name, f"skipped without a reason of ours: {message}")
                )
            else:
                result.excluded.append(FailedCheck(name, reason))
        else:
            result.passed += 1
    return result

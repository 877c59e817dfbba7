"""schemathesis: valid and invalid requests from our OpenAPI document, every answer checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = (
    "schemathesis on /openapi.json: no 5xx, no answer outside the schema, nothing wrong accepted"
)
PACKAGE = "schemathesis"
ROOT = Path(__file__).resolve().parents[2]
MIN_CASES = 1000
EXAMPLES_PER_OPERATION = 60
SEED = 1
CHECKS = {
    "not_a_server_error": "no 5xx",
    "status_code_conformance": "only statuses that the document names",
    "content_type_conformance": "only content types that it names",
    "response_headers_conformance": "headers as it says",
    "response_schema_conformance": "every answer fits its schema",
    "negative_data_rejection": "a body outside the schema is refused",
    "unsupported_method": "405 with Allow for other methods",
}
EXCLUDED = [
    FailedCheck(
        "positive_data_acceptance",
        "a body that fits the schema may still be refused: empty prompts, messages that are none, "
        "a grammar or a "
        "schema that cannot be compiled, fields that exclude each other; tests/serve holds these "
        "refusals to 400",
    ),
    FailedCheck(
        "ignored_auth, missing_required_header",
        "the document declares no header: keys are the gate's, before any route",
    ),
    FailedCheck(
        "use_after_free, ensure_resource_availability",
        "saved sessions are files that the operator's --session-dir holds, and a run has none",
    ),
    FailedCheck(
        "phase stateful",
        "the document has no links: no answer names a resource for the next request",
    ),
]


def run(base_url: str, model: str, out: Path) -> SuiteResult:
    """Phases examples, coverage and fuzzing.

    Raises RuntimeError where schemathesis leaves no report.
    """
    url = base_url.removesuffix("/v1") + "/openapi.json"
    report = out / "report.ndjson"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        url,
        "--phases",
        "examples,coverage,fuzzing",
    ]
    command += [
        "--checks",
        ",".join(CHECKS),
        "-n",
        str(EXAMPLES_PER_OPERATION),
        "--seed",
        str(SEED),
        "--workers",
        "1",
    ]
    command += [
        "--generation-database",
        "none",
        "--request-timeout",
        "120",
        "--suppress-health-check",
        "all",
    ]
    command += [
        "--report",
        "ndjson",
        "--report-ndjson-path",
        str(report),
        "--continue-on-failure",
        "--no-color",
    ]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tools.conformance._schemathesis_hooks",
        "CONFORMANCE_MODEL": model,
        "PYTHONPATH": str(ROOT),
    }
    log = out / "schemathesis.log"
    with log.open("w") as file:
        subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, timeout=3600
        )
    if not report.exists():
        raise RuntimeError(f"schemathesis left no report; see {log}")
    return read_report(report.read_text(encoding="utf-8").splitlines())


def read_report(lines: list[str]) -> SuiteResult:
    """The result of a report in NDJSON. A case passes where all of its checks do."""
    result, statuses, answered = (
        SuiteResult(0, excluded=list(EXCLUDED)),
        Counter[str](),
        Counter[str](),
    )
    reported: set[str] = set()
    for case in cases(lines):
        statuses[str(case["status"])] += 1
        if case["status"] == 200:
            answered[case["operation"]] += 1
        result.passed += not case["problems"]
        for check, problem in case["problems"]:
            name = f"{case['operation']}: {check}"
            if name not in reported:
                result.failed.append(FailedCheck(name, re.sub(r"\s+", " ", problem)[:300]))
            reported.add(name)
    count = sum(statuses.values())
    result.facts = {
        "cases": f"{count:,} (at least {MIN_CASES:,} wanted), seed {SEED}",
        "statuses": ", ".join(
            f"{status}: {number:,}" for status, number in sorted(statuses.items())
        ),
        "of 200": ", ".join(f"{name} {number}" for name, number in sorted(answered.items())),
        "checks": "; ".join(f"{name} ({what})" for name, what in CHECKS.items()),
    }
    if count < MIN_CASES:
        result.failed.append(FailedCheck("enough cases", f"{count} of {MIN_CASES}"))
    return result


def cases(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield each sent request: operation, status, and its failed (check, message) pairs."""
    for line in lines:
        event = json.loads(line)
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        sent = recorder.get("interactions", {})
        for name in recorder.get("cases", {}):
            if name not in sent:
                continue
            answer = sent[name].get("response") or {}
            checks = recorder.get("checks", {}).get(name, [])
            problems = [
                (each["name"], _check_text(each)) for each in checks if each["status"] != "success"
            ]
            if not answer:
                problems.append(("an answer", "the connection ended without one"))
            yield {
                "operation": recorder["label"],
                "status": answer.get("status_code"),
                "problems": problems,
            }


def _check_text(check: dict[str, Any]) -> str:
    failure = check.get("failure_info") or check.get("failure") or check
    return json.dumps(failure, ensure_ascii=False)

"""CompatCanary (npm): live probes of what clients of OpenAI's API rely on, profile "modern"."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = (
    "CompatCanary, profile modern: models, chat, streaming, forced tools, structured output, "
    "responses"
)
PACKAGE = "compatcanary"
VERSION = "0.2.2"


def run(base_url: str, model: str, out: Path) -> SuiteResult:
    """Installed under ``out`` by npm, of an exact version.

    Raises RuntimeError without npm or without a report.
    """
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise RuntimeError("CompatCanary needs node 20 and npm; install them")
    script = out / "node_modules" / "compatcanary" / "src" / "cli.js"
    install = [
        npm,
        "install",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(out),
        f"{PACKAGE}@{VERSION}",
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    report = out / "report.json"
    report.unlink(missing_ok=True)
    flags = ["--base-url", base_url, "--model", model, "--profile", "modern", "--timeout", "300"]
    flags += ["--format", "json", "--output", str(report), "--fail-on", "never"]
    done = subprocess.run(
        [node, str(script), "scan", *flags], capture_output=True, text=True, timeout=1200
    )
    if not report.exists():
        raise RuntimeError(f"no report: {done.stderr.strip()[:200]}")
    return read_report(json.loads(report.read_text()))


def read_report(report: dict[str, object]) -> SuiteResult:
    """A report of schema compatcanary.report.v1; a warning counts as a failure."""
    result = SuiteResult(0, version=VERSION)
    for each in report["results"]:  # type: ignore[attr-defined]
        if each["status"] == "pass":
            result.passed += 1
        else:
            result.failed.append(
                FailedCheck(each["id"], f"{each['status']}: {each['summary']}"[:300])
            )
    result.facts["score"] = f"{report['score']} of 100"
    return result

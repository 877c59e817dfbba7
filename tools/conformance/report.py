"""docs/conformance.md: which suites were run, and how each of their checks came out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tools.conformance.suite import FailedCheck, SuiteResult
from tools.verify.report import cell, section_before

HEAD = """# Conformance

Other people's test suites against `modelmill serve`, with SmolLM2-135M-Instruct in float32 on a CPU behind it. Made by
`make conformance`, which runs every suite whose result is older than the sources, and writes this page; nothing here is
written by hand. A check that is left out is listed with its reason. [llama.cpp's tests](llama_cpp_tests.md) of its own server run
apart.
"""  # noqa: E501


def render(
    suites: Mapping[str, tuple[str, SuiteResult | None]], device: str, page_before: str = ""
) -> str:
    """The page.

    suites: name → (title, result or None where it never ran here). page_before: the page as it was;
    a suite without a result stays as it stands there.
    """
    lines = [
        HEAD,
        "| suite | what | version | passed | failed | excluded | run |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (title, result) in suites.items():
        if result is None:
            lines.append(
                _row_before(page_before, name) or f"| {name} | {cell(title)} | | not run | | | |"
            )
            continue
        failed = f"**{len(result.failed)}**" if result.failed else "0"
        version = cell(f"{result.package} {result.version}")
        when = result.date + (" (of older sources)" if result.stale else "")
        what = f"| [{name}](#{name}) | {cell(title)} | {version} | {result.passed} "
        lines.append(f"{what}| {failed} | {len(result.excluded)} | {when} |")
    lines.append("")
    for name, (title, result) in suites.items():
        if result is not None:
            lines += section(name, title, result, device)
        else:
            lines += section_before(page_before, name)
    return "\n".join(lines).rstrip() + "\n"


def _row_before(page: str, name: str) -> str | None:
    """The row of a suite on a page, said to be of older sources; None where it has none."""
    match = re.search(
        rf"^(\| \[{name}\]\(#{name}\) .*?)( \(of older sources\))? \|$", page, re.MULTILINE
    )
    return f"{match[1]} (of older sources) |" if match else None


def section(name: str, title: str, result: SuiteResult, device: str) -> list[str]:
    """One suite: its facts, what failed, what was left out, how it was made."""
    lines = [f"## {name}", "", f"{title}.", ""]
    if result.facts:
        facts = [f"| {label} | {value} |" for label, value in result.facts.items()]
        lines += ["| measured | |", "|---|---|", *facts, ""]
    lines += _table("failed", "seen", result.failed) + _table("excluded", "why", result.excluded)
    lines += [f"* {note}" for note in result.notes]
    command = f"`python -m tools.conformance --only {name}`"
    return [
        *lines,
        f"* {command}: {result.seconds:.0f} s on {device}, {result.date}; commit "
        f"{result.commit or 'unknown'}, {result.package} {result.version}",
        "",
    ]


def _table(what: str, why: str, cases: list[FailedCheck]) -> list[str]:
    if not cases:
        return []
    return [
        f"| {what} | {why} |",
        "|---|---|",
        *[f"| {cell(c.name)} | {cell(c.reason)} |" for c in cases],
        "",
    ]

"""docs/verification.md: what was promised, what was measured, for someone who was not there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tools.verify.result import Fact, VerifyResult

HEAD = """# Verification

What the engine promises, and what was measured. Made by `make verify`, which runs every item below again (results are
kept while the sources stay the same) and writes this page; nothing here is written by hand. Each item ends with its command,
date and commit; `--only` runs some again, and leaves the others as they were. Every comparison is with
transformers, or with separate plain code where transformers has no such model; the model is SmolLM2-135M-Instruct from
its GGUF (Q4_1), unless an item says otherwise. What needs a GPU is in `benchmarks/results/`.
"""  # noqa: E501


MAX_SECTION = 4_000
"""Characters of an item's section; a longer one has a page of its own."""

Items = Mapping[str, tuple[str, VerifyResult | None]]
"""By number: title, and result or None where it has not run for these sources."""


def render(items: Items, page_before: str = "") -> dict[str, str]:
    """The pages by name: verification.md, and verification-N.md of each item that is long.

    page_before: verification.md as it was; an item without a result stays as it stands there.
    """
    pages = {"verification.md": _main_page(items, page_before)}
    for number, (title, result) in items.items():
        text = "\n".join(section(number, title, result))
        if len(text) > MAX_SECTION:
            pages[own_page(number)] = text.replace("##", "# Verification,", 1).rstrip() + "\n"
    return pages


def own_page(number: str) -> str:
    """Name of the page of a long item."""
    return f"verification-{number}.md"


def _main_page(items: Items, page_before: str) -> str:
    lines = [HEAD, "| item | promise | outcome |", "|---|---|---|"]
    words, sections = dict[str, str](), dict[str, list[str]]()
    for number, (title, result) in items.items():
        before = section_before(page_before, f"{number}.") if result is None else []
        words[number] = (
            outcome_before(page_before, number, before) if before else outcome_word(result)
        )
        sections[number] = before or section(number, title, result)
        lines.append(f"| {number} | {cell(title)} | {words[number]} |")
    failed = [number for number, word in words.items() if "FAILED" in word]
    lines.append("")
    if failed:
        lines.append(
            f"**Not kept: item {', '.join(failed)}.** The rows marked FAILED below say by how "
            "much.\n"
        )
    for number, text in sections.items():
        if len("\n".join(text)) > MAX_SECTION:
            text = [text[0], "", f"On [a page of its own]({own_page(number)}).", "", text[-2], ""]
        lines += text
    return "\n".join(lines).rstrip() + "\n"


def section(number: str, title: str, result: VerifyResult | None) -> list[str]:
    """One item: its facts as a table, its notes, and how it was made."""
    lines = [f"## {number}. {title}", ""]
    if result is None:
        return [*lines, "Not run for these sources.", ""]
    lines += ["| promised | measured | kept |", "|---|---|---|"]
    lines += [
        f"| {cell(row.promised)} | {cell(row.measured)} | {row_verdict(row)} |"
        for row in result.rows
    ]
    lines += ["", *[f"* {note}" for note in result.notes]]
    made = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    commit = f"commit {result.commit}" if result.commit else "**no commit**"
    measured_on = f"{result.seconds:.0f} s on {result.device}, {result.date}"
    lines += [f"* `{result.command}`: {measured_on}; {commit}, {made}", ""]
    return lines


def section_before(page: str, heading: str) -> list[str]:
    """The lines of a section of a page, [] where it has none or what it is about had not run.

    heading: how its heading begins.
    """
    pattern = rf"^## {re.escape(heading)}(?!\w).*?(?=^## |\Z)"
    match = re.search(pattern, page, re.MULTILINE | re.DOTALL)
    if match is None or "Not run for these sources." in match[0]:
        return []
    return [*match[0].rstrip().splitlines(), ""]


def outcome_before(page: str, number: str, section_text: list[str]) -> str:
    """The outcome of an item on a page; what stood there as kept is of older code."""
    row = re.search(rf"^\| {number} \| .* \| (.*) \|$", page, re.MULTILINE)
    word = row[1] if row else "not run"
    date = re.search(r", (\d{4}-\d\d-\d\d) \d\d:\d\d UTC", "\n".join(section_text))
    if "of older code" in word or word == "not run":
        return word
    return f"{word}, of older code" + (f" ({date[1]})" if date else "")


def outcome_word(result: VerifyResult | None) -> str:
    """One word for the overview."""
    if result is None:
        return "not run"
    word = "kept" if result.ok else "**FAILED**"
    return f"{word}, of older code ({result.date[:10]})" if result.is_of_older_code else word


def row_verdict(row: Fact) -> str:
    """The last column of a fact."""
    return "" if row.passed is None else "yes" if row.passed else "**FAILED**"


def cell(text: str) -> str:
    """Text that does not break a table."""
    return " ".join(text.split()).replace("|", "\\|")

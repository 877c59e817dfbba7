"""``python -m tools.peer_server_tests.page``: write docs/llama_cpp_tests.md.

The counts are those of ``results.json``, the reasons those of ``reasons``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools import generated_page
from tools.peer_server_tests.reasons import REASONS, Group
from tools.peer_server_tests.results import FAILED, NOT_APPLICABLE, PASSED, Results, load

PAGE = Path("docs/llama_cpp_tests.md")
HEAD = """# llama.cpp's tests of its server

llama.cpp tests its server over HTTP. `tools/peer_server_tests` runs these tests, from a checkout of
llama.cpp, against `modelmill serve`; nothing of them is copied into this repository. What starts
llama.cpp's server in a test starts ours instead, with the nearest options. The model is
stories260K, as in most of the tests, in float32 on a CPU; it stands in for the embedding and
reranking models, too.

```bash
# a line for each test that does not pass, with its reason
python -m tools.peer_server_tests LLAMA_CPP --model STORIES260K --commit COMMIT
# one file of them
python -m tools.peer_server_tests LLAMA_CPP --model STORIES260K --commit COMMIT --only test_lora.py
# the counts for this page, which `make llama-cpp-tests` writes
python -m tools.peer_server_tests LLAMA_CPP --model STORIES260K --commit COMMIT --save
```

LLAMA_CPP is a checkout, or `vendor/llama.cpp` of the source distribution of llama-cpp-python;
STORIES260K is that model as a Hugging Face folder. The tests need the packages `openai` and
`requests`.

A test is *not applicable* if it starts a server with an option that modelmill lacks, or with
another model; it is not run then. *Skipped* are those that llama.cpp itself leaves out; its tests
of large models (`slow`) are not counted. llama.cpp's server answers to any model's name, so a name
that a file of tests asks for becomes one of the served. Options that modelmill has per request only
(temperature, seed, `n_predict`) are added to the requests.

"""
COUNTS = """## Counts

llama.cpp {commit}: {passed} passed, {failed} failed, {inapplicable} not applicable, {skipped}
skipped; modelmill `{measured_commit}`, {date}.

| file | passed | failed | not applicable | skipped |
|---|---|---|---|---|
"""
FAILURES = """
## Why tests fail

Each failed test belongs to one line, by a rule over its failed statement and the refused request;
one without a line fails the run. A test ends at its first failed statement: what it would check
behind it is not known.

| kind | tests | reason |
|---|---|---|
"""
FEATURES = """
## What tests need that is not here

| needs | tests |
|---|---|
"""


def render(root: Path = generated_page.ROOT) -> dict[Path, str]:
    """The page by its path below the repository."""
    results = load(root)
    known = (PASSED, FAILED, NOT_APPLICABLE)
    skipped = sum(results.total(each) for each in _outcomes(results) if each not in known)
    text = HEAD + COUNTS.format(
        commit=results.commit,
        measured_commit=results.measured_commit,
        date=results.date,
        passed=results.total(PASSED),
        failed=results.total(FAILED),
        inapplicable=results.total(NOT_APPLICABLE),
        skipped=skipped,
    )
    text += _rows(_file_row(name, counts) for name, counts in results.files.items())
    text += FAILURES + _rows(
        (group.value, results.reasons[each.text], each.text)
        for group in Group
        for each in REASONS
        if each.group is group and each.text in results.reasons
    )
    return {PAGE: text + FEATURES + _rows(results.features.items())}


def _outcomes(results: Results) -> set[str]:
    return {outcome for counts in results.files.values() for outcome in counts}


def _file_row(name: str, counts: dict[str, int]) -> Sequence[object]:
    known = [counts.get(each, 0) for each in (PASSED, FAILED, NOT_APPLICABLE)]
    return f"`{name}`", *known, sum(counts.values()) - sum(known)


def _rows(rows: Iterable[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return generated_page.run_pages(argv, __doc__, "llama-cpp-tests", render)


if __name__ == "__main__":
    sys.exit(main())

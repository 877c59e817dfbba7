"""Which code a tool ran, and when: what files of results say of a run."""

from __future__ import annotations

import datetime
from pathlib import PurePath

from modelmill.eval.provenance import git_commit
from tools.generated_page import ROOT


def commit_and_date(results: PurePath) -> tuple[str, str]:
    """The commit, with "-dirty" where other files than the results differ, and the date in UTC.

    Args:
        results: the file that the tool writes, below the repository.
    """
    commit = git_commit(ROOT, written=results.as_posix()) or ""
    return commit, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"

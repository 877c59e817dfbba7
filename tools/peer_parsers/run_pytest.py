"""Runs pytest in a peer's checkout, with this repository's ``tools`` beside a peer's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

from tools.peer_parsers import pytest_plugin


def main(argv: Sequence[str]) -> int:
    """Run pytest; the first argument is the checkout, the others are pytest's."""
    checkout, *arguments = argv
    os.chdir(checkout)
    # tools is imported already; all else of the peer comes first, as its tests expect
    sys.path.insert(0, checkout)
    return pytest.main(arguments, plugins=[pytest_plugin])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

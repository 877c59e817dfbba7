"""``python -m tools.performance``: docs/performance.md, plots, index of notes; or ``--check``."""

from __future__ import annotations

import sys

from tools import generated_page
from tools.performance.page import stale_files, write


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or with --check 1 where a file is not what template, notes and rows give."""
    return generated_page.run(argv, __doc__, "performance", stale_files, write)


if __name__ == "__main__":
    sys.exit(main())

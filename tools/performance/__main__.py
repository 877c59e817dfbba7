"""``python -m tools.performance``: write docs/performance.md and its plots; ``--check`` only says what is stale."""

from __future__ import annotations

import sys

from tools import page
from tools.performance.page import stale, write


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or with --check 1 where a file is not what the rows and the story give."""
    return page.run(argv, __doc__, "performance", stale, write)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tools.command_line_pages``: write docs/cli from the help pages.

A page is what ``modelmill VERB --help`` prints at a fixed width, so that names, defaults and texts
have one source. docs/command-line.md, written by hand, links to them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from modelmill.cli.help_page import subcommand_help_page
from modelmill.cli.main import list_subcommands
from modelmill.core.module_lookup import import_module_if_exists
from tools import generated_page

FOLDER = Path("docs/cli")
WIDTH = 100
NOTE = "<!-- Made by `make command-line` from `modelmill {verb} --help`. -->"


def render() -> dict[Path, str]:
    """Every page by its path below the repository."""
    pages = {}
    for name in list_subcommands():
        module = import_module_if_exists("modelmill.cli", name)
        assert module is not None
        verb = name.replace("_", "-")
        text = subcommand_help_page(name, module, WIDTH).rstrip()
        pages[FOLDER / f"{verb}.md"] = (
            f"{NOTE.format(verb=verb)}\n\n# modelmill {verb}\n\n```text\n{text}\n```\n"
        )
    return pages


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages; with ``--check`` only say which are stale."""
    return generated_page.run_pages(argv, __doc__, "command-line", lambda _: render(), FOLDER)


if __name__ == "__main__":
    sys.exit(main())

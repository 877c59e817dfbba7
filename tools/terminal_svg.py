"""Draw the output of commands as an SVG picture of a terminal.

    python -m tools.terminal_svg OUT.svg "COMMAND" ["COMMAND" …]

Each command runs now; nothing in the picture is typed by hand. Long lines are wrapped at the
picture's width.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

TERMINAL_COLUMNS = 112


def main() -> int:
    """Run, record, write."""
    out, commands = Path(sys.argv[1]), sys.argv[2:]
    console = Console(
        record=True,
        width=TERMINAL_COLUMNS,
        file=open("/dev/null", "w"),  # noqa: SIM115
        force_terminal=True,
    )
    for command in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        done = subprocess.run(
            command,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for line in done.stdout.rstrip().splitlines():
            console.print(Text(line.rstrip()))
        if done.returncode:
            console.print(Text(f"exit code {done.returncode}", "red"))
        console.print()
    console.save_svg(str(out), title="modelmill")
    print(f"{out}: {len(commands)} commands")
    return 0


if __name__ == "__main__":
    sys.exit(main())

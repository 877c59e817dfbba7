"""Rows of a benchmark as lines of a file: what was measured, of what, by which command, when."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def portable_command(script: str, arguments: Iterable[str]) -> str:
    """The command as somebody else would give it: folders of this machine by their last name."""
    told = [Path(each).name if Path(each).is_absolute() else each for each in arguments]
    return shlex.join(["python", f"benchmarks/{script}.py", *told])


def append_rows(out: Path, rows: Iterable[Mapping[str, Any]], command: str) -> None:
    """Write rows behind those of ``out``; a row's "facts", a table, become its own keys."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with out.open("a", encoding="utf-8") as sink:
        for row in rows:
            told = {key: value for key, value in row.items() if key != "facts"}
            told |= {**row["facts"], "command": command, "date": date}
            sink.write(json.dumps(told, ensure_ascii=False) + "\n")

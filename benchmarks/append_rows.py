"""Rows of a benchmark as lines of a file: what was measured, of what, by which command, when."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modelmill.eval.provenance import provenance


def portable_command(script: str, arguments: Iterable[str]) -> str:
    """Return the command without absolute paths: only their last component is kept."""
    portable = [Path(each).name if Path(each).is_absolute() else each for each in arguments]
    return shlex.join(["python", f"benchmarks/{script}.py", *portable])


def append_rows(out: Path, rows: Iterable[Mapping[str, Any]], command: str) -> None:
    """Write rows, with their provenance, behind those of ``out``.

    A row's "facts", a table, become its own keys.
    """
    origin = provenance()
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with out.open("a", encoding="utf-8") as sink:
        for row in rows:
            merged = {key: value for key, value in row.items() if key != "facts"}
            merged |= {**origin, **row["facts"], "command": command, "date": date}
            sink.write(json.dumps(merged, ensure_ascii=False) + "\n")

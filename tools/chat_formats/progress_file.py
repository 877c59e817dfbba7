"""The file that says how far a run of the checks came."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tools.chat_formats.run_checks import FormatRun


class ProgressFile:
    """Runs by format; without a path they are only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._runs: dict[str, FormatRun] = {}
        if path is not None and path.exists():
            values = json.loads(path.read_text("utf-8"))
            self._runs = {name: FormatRun(**value) for name, value in values.items()}

    def get(self, name: str, first_seed: int) -> FormatRun:
        """Return the run of a format; a run from another seed starts anew."""
        run = self._runs.get(name)
        if run is None or run.first_seed != first_seed:
            run = self._runs[name] = FormatRun(name, first_seed)
        return run

    def put(self, run: FormatRun) -> None:
        """Replace the run of a format."""
        self._runs[run.name] = run

    def save(self) -> None:
        """Write the file; a crash leaves the old one."""
        if self._path is None:
            return
        values = {name: asdict(run) for name, run in self._runs.items()}
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(values, indent=1), "utf-8")
        new.replace(self._path)

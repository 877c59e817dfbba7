"""The file of the runs that docs/parser_differences.md shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.peer_parsers.counts import PeerCounts

PATH = Path(__file__).with_name("results.json")


def load_results(path: Path = PATH) -> list[PeerCounts]:
    """Return the runs."""
    if not path.exists():
        return []
    return [PeerCounts(**value) for value in json.loads(path.read_text("utf-8"))]


def save_results(results: Sequence[PeerCounts], path: Path = PATH) -> None:
    """Write the runs."""
    ordered = sorted(results, key=lambda each: (each.peer, each.commit))
    text = json.dumps([asdict(each) for each in ordered], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")

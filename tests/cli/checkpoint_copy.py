"""Copies of a checkpoint with another config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def copy_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy the files, not their permissions, into the new ``folder``; returns it."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

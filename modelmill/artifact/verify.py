"""Integrity: every hashed file of an engine is read once and compared with its sha256.

Reading 15 GB at each start would take longer than loading them, so a passed check is recorded in
the cache folder with the files' sizes, times and inodes; a changed file is read again. ``force``
reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from modelmill.artifact.store import Artifact
from modelmill.core.env import cache_dir
from modelmill.core.errors import CorruptArtifact
from modelmill.core.progress_callback import Progress


def verify_file_hashes(
    artifact: Artifact, *, force: bool = False, on_progress: Progress | None = None
) -> None:
    """Check the files' hashes.

    on_progress: called with ("checking", bytes read, bytes in all).

    Raises:
        CorruptArtifact: with the name of the first damaged file.
    """
    stamp = _file_sizes_and_mtimes(artifact)
    note = cache_dir() / "verified" / f"{artifact.manifest.digest()[:32]}.json"
    if not force:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(note.read_text()) == stamp:
                return
    done, total = 0, artifact.nbytes()
    for name, entry in artifact.manifest.files.items():
        digest = hashlib.sha256()
        with (artifact.path / name).open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
                done += len(chunk)
                if on_progress is not None:
                    on_progress("checking", done, total)
        if digest.hexdigest() != entry["sha256"]:
            raise CorruptArtifact(
                f"{artifact.path / name} was damaged after the build (its sha256 differs); "
                "rebuild the engine"
            )
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(".part")
        part.write_text(json.dumps(stamp))
        part.replace(note)


def _file_sizes_and_mtimes(artifact: Artifact) -> dict[str, list[int]]:
    out = {}
    for name in artifact.manifest.files:
        stat = Path(artifact.path / name).stat()
        out[str((artifact.path / name).resolve())] = [
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            stat.st_ino,
        ]
    return out

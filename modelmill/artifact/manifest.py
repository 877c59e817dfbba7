"""The manifest: one JSON file, written last, that describes an engine folder.

Everything here follows from the checkpoint and the BuildConfig alone, so that two builds are
bit-identical. What depends on the machine or the time is in ``tuning/<device>.json``, outside the
hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact, UsageError
from modelmill.core.quoting import quote

MANIFEST_SCHEMA_VERSION = 1
PACKING_VERSION = "rows/2"
MANIFEST_FILE = "manifest.json"
WEIGHT_FILE_PREFIX = "weights/"  # of the weight files' names
MAX_MODEL_LEN = 1 << 24
# engine types, and the command that uses each
USAGE_BY_ENGINE_TYPE = {
    "language": "writes text: modelmill run {}",
    "segmentation": "segments images: modelmill segment {} IMAGE",
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of the manifest.

    Attributes:
        config: the checkpoint's own config (Hugging Face keys).
        build: the resolved BuildConfig.
        weight_formats: linear module → weight format.
        aliases: tensor → the tensor whose memory it shares.
        files: path inside the folder → {"sha256", "bytes"}.
        packing: layout of the weights.
        generation: the checkpoint's generation_config.
    """

    schema: int
    engine_type: str
    model_type: str
    packing: str
    max_model_len: int
    config: dict[str, Any]
    build: dict[str, Any]
    weight_formats: dict[str, str]
    aliases: dict[str, str]
    generation: dict[str, Any]
    source: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]

    def digest(self) -> str:
        """Return the sha256 over the canonical JSON, the engine's identity in prefix cache keys."""
        return hashlib.sha256(_canonical_json(asdict(self)).encode()).hexdigest()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(
            int(entry["bytes"])
            for name, entry in self.files.items()
            if name.startswith(WEIGHT_FILE_PREFIX)
        )

    def to_json(self) -> str:
        """Return the file's text, which contains its own digest, so that changes are detected."""
        return (
            json.dumps({**asdict(self), "digest": self.digest()}, indent=1, sort_keys=True) + "\n"
        )

    @staticmethod
    def from_json(text: str, engine_path: str) -> Manifest:
        """Parse and check a manifest.

        Raises:
            CorruptArtifact: if it is damaged.
            IncompatibleArtifact: if it has another schema or packing.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} is not JSON; rebuild the engine"
            ) from None
        if not isinstance(raw, Mapping) or "schema" not in raw:
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} is not an engine's manifest; rebuild the engine"
            )
        if raw["schema"] != MANIFEST_SCHEMA_VERSION:
            raise IncompatibleArtifact(
                f"{engine_path} has schema {str(raw['schema'])[:20]!r}, this modelmill reads "
                f"{MANIFEST_SCHEMA_VERSION}; rebuild it: "
                f"modelmill build CHECKPOINT -o {engine_path}"
            )
        names = {f.name for f in fields(Manifest)}
        if set(raw) != names | {"digest"}:
            odd = ", ".join(repr(name[:40]) for name in sorted(set(raw) ^ (names | {"digest"}))[:5])
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} has unknown or missing keys: {odd}; rebuild the "
                "engine"
            )
        manifest = Manifest(**{k: v for k, v in raw.items() if k != "digest"})
        if manifest.digest() != raw["digest"]:
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} was changed after the build (its sha256 differs); "
                "rebuild the engine"
            )
        _check_value_types(manifest, engine_path)
        if manifest.packing != PACKING_VERSION:
            raise IncompatibleArtifact(
                f"{engine_path} is packed as {manifest.packing[:40]!r}, this modelmill reads "
                f"{PACKING_VERSION}; "
                f"rebuild it: modelmill build CHECKPOINT -o {engine_path}"
            )
        return manifest


def _check_value_types(manifest: Manifest, engine_path: str) -> None:
    """Check the type of every value; a valid digest does not prove that the values are valid."""
    tables = (manifest.config, manifest.build, manifest.generation, manifest.source)
    texts = (manifest.weight_formats, manifest.aliases, manifest.versions)
    kernels = manifest.build.get("kernels") if isinstance(manifest.build, dict) else None
    fine = (
        all(
            isinstance(text, str)
            for text in (manifest.engine_type, manifest.model_type, manifest.packing)
        )
        and all(isinstance(table, dict) for table in (*tables, *texts, manifest.files, kernels))
        and all(isinstance(value, str) for table in (*texts, kernels) for value in table.values())  # type: ignore[union-attr]
        and type(manifest.max_model_len) is int
        and 0 < manifest.max_model_len <= MAX_MODEL_LEN
    )
    if not fine:
        raise CorruptArtifact(
            f"{engine_path}/{MANIFEST_FILE} has values of the wrong type; rebuild the engine"
        )
    for name, entry in manifest.files.items():
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or not name.isprintable():
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} names a file outside the engine: {name[:200]!r}"
            )
        known = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
        if not known or type(entry.get("bytes")) is not int:
            raise CorruptArtifact(
                f"{engine_path}/{MANIFEST_FILE} gives {name[:200]!r} no sha256 and size; rebuild "
                "the engine"
            )


def check_engine_type(path: Path, engine_type: str, expected: str) -> None:
    """Raise UsageError with the right command if the engine type differs from the expected one."""
    if engine_type != expected:
        does = (
            USAGE_BY_ENGINE_TYPE[engine_type].format(path)
            if engine_type in USAGE_BY_ENGINE_TYPE
            else f"is of an unknown kind, {quote(engine_type)}"
        )
        raise UsageError(f"{path}: this engine {does}")


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

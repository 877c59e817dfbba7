"""What a catalogue lists: engines by name, from a folder of engines or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.core.byte_size import parse_bytes
from modelmill.core.errors import ArtifactError, UsageError
from modelmill.core.quoting import quote
from modelmill.serve.catalogue.keep_alive import parse_keep_alive
from modelmill.serve.config_table_file import check_table, read_config_tables

MODEL_MARKER_FILES = (MANIFEST_FILE, "config.json")
"""Of an engine and of a checkpoint."""
_ENTRY_FIELDS = {"name", "engine", "pinned", "idle_timeout", "aliases", "kv_cache_bytes"}


@dataclass(frozen=True)
class CatalogueEntry:
    """An engine that is loaded on demand.

    Attributes:
        name: in requests.
        path: the engine folder.
        pinned: loaded at the start, and never unloaded by time or memory.
        idle_timeout: seconds that it stays loaded unused; None: the server's keep-alive.
        aliases: further names.
        kv_cache_bytes: for its KV cache and recurrent state; None: the server's rule.
    """

    name: str
    path: Path
    pinned: bool = False
    idle_timeout: float | None = None
    aliases: tuple[str, ...] = ()
    kv_cache_bytes: int | None = None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of an engine folder.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    try:
        text = (path / MANIFEST_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ArtifactError(f"{path} has no {MANIFEST_FILE} that can be read") from None
    return Manifest.from_json(text, str(path))


def manifest_fingerprint(path: Path) -> tuple[int, int, int] | None:
    """What changes when an engine is rebuilt: its manifest is written last. None: it is gone."""
    try:
        status = (path / MANIFEST_FILE).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_models_folder(folder: Path) -> bool:
    """Whether a folder is no model itself but has engines as sub-folders."""
    if not folder.is_dir() or any((folder / name).exists() for name in MODEL_MARKER_FILES):
        return False
    return any((path / MANIFEST_FILE).is_file() for path in folder.iterdir())


def read_models_folder(folder: Path) -> list[CatalogueEntry]:
    """List the engines in a folder: each sub-folder with a manifest, by name.

    Raises:
        UsageError: there is none, or two have the same name.
    """
    if not folder.is_dir():
        raise UsageError(f"--models-dir {folder} is not a folder")
    entries = find_engine_entries(folder)
    if not entries:
        raise UsageError(
            f"--models-dir {folder} holds no engine: no sub-folder has a {MANIFEST_FILE}"
        )
    return entries


def find_engine_entries(folder: Path) -> list[CatalogueEntry]:
    """List the engines in a folder, which may be none. Raises OSError."""
    return [
        CatalogueEntry(path.name.removesuffix(".engine"), path)
        for path in sorted(folder.iterdir())
        if (path / MANIFEST_FILE).is_file() and not path.name.startswith(".")
    ]


def read_catalogue_file(file: Path) -> list[CatalogueEntry]:
    """Read a catalogue in JSON or TOML: a list ``models`` of tables.

    Engine paths are relative to the file's folder.

    Raises:
        UsageError: it cannot be read, or an entry is invalid; the message names it.
    """
    tables = read_config_tables("--catalogue", file, "models")
    return [_parse_entry(file, number, each) for number, each in enumerate(tables)]


def _parse_entry(file: Path, number: int, raw: Any) -> CatalogueEntry:
    where = f"--catalogue {file}: models[{number}]"
    raw = check_table(where, raw, _ENTRY_FIELDS)
    engine = _get_typed_value(where, raw, "engine", str, None)
    if not engine:
        raise UsageError(f"{where}: engine is missing")
    path = file.parent / engine
    name = _get_typed_value(where, raw, "name", str, path.name.removesuffix(".engine"))
    aliases = _get_typed_value(where, raw, "aliases", list, [])
    if not name.strip() or not all(isinstance(each, str) and each.strip() for each in aliases):
        raise UsageError(f"{where}: name and aliases must be strings that are not empty")
    kv_cache_bytes = _parse_byte_size(where, raw, "kv_cache_bytes")
    idle = raw.get("idle_timeout")
    if not isinstance(idle, str | int | float | None):
        raise UsageError(f'{where}: idle_timeout must be seconds or a duration as "5m"')
    try:
        idle_timeout = None if idle is None else parse_keep_alive(idle)
    except UsageError as error:
        raise UsageError(f"{where}: {str(error).replace('keep_alive', 'idle_timeout')}") from None
    pinned = _get_typed_value(where, raw, "pinned", bool, False)
    return CatalogueEntry(name, path, pinned, idle_timeout, tuple(aliases), kv_cache_bytes)


def _parse_byte_size(where: str, raw: Mapping[str, Any], key: str) -> int | None:
    """A number of bytes, or a size as "2GiB"; None: not set."""
    value = raw.get(key)
    size = (
        parse_bytes(value)
        if isinstance(value, str)
        else _get_typed_value(where, raw, key, int, None)
    )
    if size is None and value is not None:
        raise UsageError(
            f'{where}: {key} must be bytes or a size as "2GiB", not {quote(value, 60)}'
        )
    if size is not None and size < 1:
        raise UsageError(f"{where}: {key} must be at least 1")
    return size


def _get_typed_value(
    where: str, raw: Mapping[str, Any], key: str, expected: type, default: Any
) -> Any:
    value = raw.get(key, default)
    matches = isinstance(value, expected) and not (expected is int and isinstance(value, bool))
    if key in raw and not matches:
        names = {str: "a string", bool: "true or false", list: "a list", int: "an integer"}
        raise UsageError(f"{where}: {key} must be {names[expected]}, not {quote(value, 60)}")
    return value


def check_entries(entries: Sequence[CatalogueEntry], used_names: Sequence[str]) -> None:
    """Check that every name is used once, and that every engine is there.

    Args:
        entries: of the catalogue.
        used_names: names that are served otherwise.

    Raises:
        UsageError: a name is used twice, or a folder is no engine.
    """
    names = set(used_names)
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name in names:
                raise UsageError(f"two engines would be served as {name}; give one another name")
            names.add(name)
        if not (entry.path / MANIFEST_FILE).is_file():
            raise UsageError(f"{entry.path} of the catalogue is no engine folder")

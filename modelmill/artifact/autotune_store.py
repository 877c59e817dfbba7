"""``tuning/<device>.json``: launch configs that a build measured on one device.

The file depends on the machine and the time, so it is outside the hashes. It affects only speed, so
a damaged file is reported and ignored, and never keeps an engine from running.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTOTUNE_SCHEMA_VERSION = 1
AUTOTUNE_FOLDER = "tuning"
MAX_FILE_BYTES = 1 << 20
MAX_LAUNCH_VALUE = 1 << 20


@dataclass(frozen=True)
class AutotuneRecord:
    """Launch configs of a device.

    Attributes:
        choices: op → GEMM → launch config.
        facts: what was measured, with which versions, when; informative only.
    """

    device: str
    choices: Mapping[str, Mapping[str, tuple[int, ...]]]
    facts: Mapping[str, Any]


def autotune_record_path(device: str) -> str:
    """Return the path of a device's file inside the engine."""
    return f"{AUTOTUNE_FOLDER}/{device_slug(device)}.json"


def device_slug(device: str) -> str:
    """Return a device's name as a file name: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:80] or "unnamed"


def encode_autotune_record(record: AutotuneRecord) -> bytes:
    """Return the file's content."""
    raw = {
        "schema": AUTOTUNE_SCHEMA_VERSION,
        "device": record.device,
        "choices": record.choices,
        "facts": record.facts,
    }
    return (json.dumps(raw, indent=1, sort_keys=True) + "\n").encode()


def read_autotune_record(engine: Path, device: str) -> AutotuneRecord | None:
    """Read the record of a device; None if there is none.

    Raises:
        ValueError: with a short reason, if the file is damaged.
    """
    path = engine / autotune_record_path(device)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("too large")
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(error.strerror or "unreadable") from None
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    return _parse_record(raw, device)


def _parse_record(raw: Any, device: str) -> AutotuneRecord:
    if not isinstance(raw, dict) or raw.get("schema") != AUTOTUNE_SCHEMA_VERSION:
        raise ValueError(f"its schema is not {AUTOTUNE_SCHEMA_VERSION}")
    choices, facts = raw.get("choices"), raw.get("facts")
    if raw.get("device") != device:
        raise ValueError("it belongs to another device")
    if not isinstance(facts, dict) or not isinstance(choices, dict):
        raise ValueError("without choices")
    launch_configs: dict[str, dict[str, tuple[int, ...]]] = {}
    for op, chosen in choices.items():
        if not isinstance(chosen, dict) or not all(
            _is_launch_config(each) for each in chosen.values()
        ):
            raise ValueError("its sizes are not integers")
        launch_configs[op] = {name: tuple(sizes) for name, sizes in chosen.items()}
    return AutotuneRecord(device, launch_configs, facts)


def _is_launch_config(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(each) is int and 0 < each <= MAX_LAUNCH_VALUE for each in value
    )


def tuned_devices(engine: Path) -> list[str]:
    """Return the device names in the engine's files; for a damaged file its file name."""
    names = []
    for path in sorted((engine / AUTOTUNE_FOLDER).glob("*.json")):
        try:
            name = (
                json.loads(path.read_bytes())["device"]
                if path.stat().st_size <= MAX_FILE_BYTES
                else None
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            name = None
        names.append(
            name
            if isinstance(name, str) and device_slug(name) == path.stem
            else f"{path.name} (damaged)"
        )
    return names

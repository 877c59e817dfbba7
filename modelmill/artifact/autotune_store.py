"""``tuning/<device>.json``: launch sizes that a build measured on one device, by the device's name.

It depends on the machine and the day, so it lies outside the hashes; it decides speed alone, so a
damaged one is told and left out, and never keeps an engine from running.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
FOLDER = "tuning"
MAX_FILE_BYTES = 1 << 20
MAX_LAUNCH_VALUE = 1 << 20


@dataclass(frozen=True)
class AutotuneRecord:
    """choices: op → product → launch sizes.

    facts: what was measured, with which versions, when; for reading only.
    """

    device: str
    choices: Mapping[str, Mapping[str, tuple[int, ...]]]
    facts: Mapping[str, Any]


def record_path(device: str) -> str:
    """The file of a device, inside the engine."""
    return f"{FOLDER}/{device_slug(device)}.json"


def device_slug(device: str) -> str:
    """A device's name as a file name: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:80] or "unnamed"


def record_to_bytes(record: AutotuneRecord) -> bytes:
    """The file's content."""
    raw = {
        "schema": SCHEMA,
        "device": record.device,
        "choices": record.choices,
        "facts": record.facts,
    }
    return (json.dumps(raw, indent=1, sort_keys=True) + "\n").encode()


def read_record(engine: Path, device: str) -> AutotuneRecord | None:
    """What is stored for a device; None where nothing is.

    Raises ValueError, in a few words, for a damaged file.
    """
    path = engine / record_path(device)
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
    return _parse(raw, device)


def _parse(raw: Any, device: str) -> AutotuneRecord:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"not of schema {SCHEMA}")
    choices, facts = raw.get("choices"), raw.get("facts")
    if raw.get("device") != device:
        raise ValueError("made for another device")
    if not isinstance(facts, dict) or not isinstance(choices, dict):
        raise ValueError("without choices")
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for op, chosen in choices.items():
        if not isinstance(chosen, dict) or not all(
            _is_launch_config(each) for each in chosen.values()
        ):
            raise ValueError("sizes that are no whole numbers")
        found[op] = {name: tuple(sizes) for name, sizes in chosen.items()}
    return AutotuneRecord(device, found, facts)


def _is_launch_config(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(each) is int and 0 < each <= MAX_LAUNCH_VALUE for each in value
    )


def tuned_devices(engine: Path) -> list[str]:
    """Names of the devices that the engine has files for, as the files call them; a damaged one by
    its file's name.
    """
    found = []
    for path in sorted((engine / FOLDER).glob("*.json")):
        try:
            name = (
                json.loads(path.read_bytes())["device"]
                if path.stat().st_size <= MAX_FILE_BYTES
                else None
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            name = None
        found.append(
            name
            if isinstance(name, str) and device_slug(name) == path.stem
            else f"{path.name} (damaged)"
        )
    return found

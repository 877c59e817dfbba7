"""Which launch sizes an engine has for this device; without any, the defaults serve, and that is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.artifact.tuning import path_of, read_tuning, tuned_devices
from modelmill.core import log
from modelmill.ops import shelf
from modelmill.ops.tuning import Key, Tuning, accepted, key_of_text

_log = log.get(__name__)


@dataclass(frozen=True)
class Found:
    """tuning: None means default launch sizes. told: one line for people. odd: whether it may surprise them."""

    tuning: Tuning | None
    told: str
    odd: bool = False


def tuning_for(engine: Path, device: str) -> Tuning | None:
    """The engine's launch sizes for ``device`` ("cuda:0"); on a CPU there is nothing to choose. Logs what it found."""
    if not device.startswith("cuda"):
        return None
    found = look(engine, torch.cuda.get_device_name(device))
    (_log.warning if found.odd else _log.info)("%s", found.told)
    return found.tuning


def look(engine: Path, name: str) -> Found:
    """What an engine holds for the device of that name."""
    again = f"modelmill build CHECKPOINT -o {engine} on this device tunes them"
    try:
        stored = read_tuning(engine, name)
        choices = {} if stored is None else {op: _keys(chosen) for op, chosen in stored.choices.items()}
    except ValueError as error:
        damaged = f"{engine / path_of(name)} is damaged ({error}): default launch sizes; {again}"
        return Found(None, damaged, odd=True)
    if stored is None:
        others = tuned_devices(engine)
        elsewhere = f" (it was tuned for {', '.join(others)})" if others else ""
        return Found(None, f"{engine} has no tuning for {name}{elsewhere}: default launch sizes; {again}", bool(others))
    kept = {op: _accepted(op, chosen) for op, chosen in choices.items()}
    tuning = Tuning(name, {op: chosen for op, chosen in kept.items() if chosen})
    left = sum(map(len, choices.values())) - tuning.count
    told = f"tuned for {name}: {tuning.count} products with launch sizes of their own"
    if left:
        return Found(tuning, f"{told}, {left} that this version does not know left out; {again}", odd=True)
    return Found(tuning, told)


def _keys(chosen: object) -> dict[Key, tuple[int, ...]]:
    assert isinstance(chosen, dict)
    return {key_of_text(text): sizes for text, sizes in chosen.items()}


def _accepted(op: str, chosen: dict[Key, tuple[int, ...]]) -> dict[Key, tuple[int, ...]]:
    found: dict[Key, tuple[int, ...]] = {}
    for module in shelf.variants(op).values():
        found |= accepted(module, chosen)
    return found

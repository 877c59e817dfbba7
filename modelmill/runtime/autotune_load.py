"""Which launch sizes an engine has for this device; without any, the defaults serve, and that is
said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.artifact.autotune_store import read_record, record_path, tuned_devices
from modelmill.core import log
from modelmill.ops import registry
from modelmill.ops.launch_configs import GemmKey, Tuning, filter_supported, parse_key

_log = log.get_logger(__name__)


@dataclass(frozen=True)
class TuningLookup:
    """tuning: None means default launch sizes. message: one line for people. is_warning: whether it
    may surprise them."""

    tuning: Tuning | None
    message: str
    is_warning: bool = False


def load_tuning(engine: Path, device: str) -> Tuning | None:
    """The engine's launch sizes for ``device`` ("cuda:0"); on a CPU there is nothing to choose.

    Logs what it found.
    """
    if not device.startswith("cuda"):
        return None
    found = look_up_tuning(engine, torch.cuda.get_device_name(device))
    (_log.warning if found.is_warning else _log.info)("%s", found.message)
    return found.tuning


def look_up_tuning(engine: Path, name: str) -> TuningLookup:
    """What an engine holds for the device of that name."""
    again = f"modelmill build CHECKPOINT -o {engine} on this device tunes them"
    try:
        stored = read_record(engine, name)
        choices = (
            {} if stored is None else {op: _keys(chosen) for op, chosen in stored.choices.items()}
        )
    except ValueError as error:
        damaged = (
            f"{engine / record_path(name)} is damaged ({error}): default launch sizes; {again}"
        )
        return TuningLookup(None, damaged, is_warning=True)
    if stored is None:
        others = tuned_devices(engine)
        elsewhere = f" (it was tuned for {', '.join(others)})" if others else ""
        return TuningLookup(
            None,
            f"{engine} has no tuning for {name}{elsewhere}: default launch sizes; {again}",
            bool(others),
        )
    supported = {op: _accepted(op, chosen) for op, chosen in choices.items()}
    tuning = Tuning(name, {op: chosen for op, chosen in supported.items() if chosen})
    left = sum(map(len, choices.values())) - tuning.count
    message = f"tuned for {name}: {tuning.count} products with launch sizes of their own"
    if left:
        return TuningLookup(
            tuning,
            f"{message}, {left} that this version does not know left out; {again}",
            is_warning=True,
        )
    return TuningLookup(tuning, message)


def _keys(chosen: object) -> dict[GemmKey, tuple[int, ...]]:
    assert isinstance(chosen, dict)
    return {parse_key(text): sizes for text, sizes in chosen.items()}


def _accepted(op: str, chosen: dict[GemmKey, tuple[int, ...]]) -> dict[GemmKey, tuple[int, ...]]:
    found: dict[GemmKey, tuple[int, ...]] = {}
    for module in registry.implementations(op).values():
        found |= filter_supported(module, chosen)
    return found

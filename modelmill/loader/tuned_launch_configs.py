"""Loads an engine's autotuned launch configs for this device; logs if the defaults are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.artifact.autotune_store import (
    autotune_record_path,
    read_autotune_record,
    tuned_devices,
)
from modelmill.core import log
from modelmill.ops import registry
from modelmill.ops.launch_configs import (
    GemmKey,
    TunedLaunchConfigs,
    filter_by_candidates,
    parse_key,
)

_log = log.get_logger(__name__)


@dataclass(frozen=True)
class TuningLookup:
    """Result of a lookup.

    Attributes:
        tuning: None: default launch configs.
        message: One line for the log.
        is_warning: Whether the user should know it.
    """

    tuning: TunedLaunchConfigs | None
    message: str
    is_warning: bool = False


def load_tuning(engine: Path, device: str) -> TunedLaunchConfigs | None:
    """Load the engine's launch configs for ``device`` ("cuda:0") and log the result.

    None: the defaults; always so on a CPU.
    """
    if not device.startswith("cuda"):
        return None
    lookup = look_up_tuning(engine, torch.cuda.get_device_name(device))
    (_log.warning if lookup.is_warning else _log.info)("%s", lookup.message)
    return lookup.tuning


def look_up_tuning(engine: Path, name: str) -> TuningLookup:
    """Look up an engine's launch configs for the device of that name."""
    advice = f"modelmill build CHECKPOINT -o {engine} on this device tunes them"
    try:
        stored = read_autotune_record(engine, name)
        choices = (
            {}
            if stored is None
            else {op: _parse_configs(configs) for op, configs in stored.choices.items()}
        )
    except ValueError as error:
        path = engine / autotune_record_path(name)
        damaged = f"{path} is damaged ({error}): default launch configs; {advice}"
        return TuningLookup(None, damaged, is_warning=True)
    if stored is None:
        others = tuned_devices(engine)
        elsewhere = f" (it was tuned for {', '.join(others)})" if others else ""
        return TuningLookup(
            None,
            f"{engine} has no tuning for {name}{elsewhere}: default launch configs; {advice}",
            bool(others),
        )
    supported = {op: _supported_configs(op, configs) for op, configs in choices.items()}
    tuning = TunedLaunchConfigs(name, {op: configs for op, configs in supported.items() if configs})
    num_unsupported = sum(map(len, choices.values())) - tuning.count
    message = f"tuned for {name}: {tuning.count} products with tuned launch configs"
    if num_unsupported:
        return TuningLookup(
            tuning,
            f"{message}, {num_unsupported} that this version does not support left out; {advice}",
            is_warning=True,
        )
    return TuningLookup(tuning, message)


def _parse_configs(configs: object) -> dict[GemmKey, tuple[int, ...]]:
    assert isinstance(configs, dict)
    return {parse_key(text): sizes for text, sizes in configs.items()}


def _supported_configs(
    op: str, configs: dict[GemmKey, tuple[int, ...]]
) -> dict[GemmKey, tuple[int, ...]]:
    supported: dict[GemmKey, tuple[int, ...]] = {}
    for module in registry.implementations(op).values():
        supported |= filter_by_candidates(module, configs)
    return supported

"""The speed targets: requests, the physical floor on one H200, and the required figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedTarget:
    """One line of the table of targets.

    floor: weights and KV over 4.25 TB/s, or the GEMMs at the bf16 rate; None for none.

    reference_mark: what vLLM 0.25.1 took on the card, and that day, for which ``required`` was set;
    None where that is unknown.
    """

    title: str
    unit: str
    required: float
    stretch_goal: float
    floor: float | None
    reference_mark: float | None = None


TARGETS: Mapping[str, SpeedTarget] = {
    "decode-1x128": SpeedTarget("decode, batch 1, prompt 128", "ms/token", 3.8, 3.5, 3.34, 4.84),
    "decode-1x4096": SpeedTarget("decode, batch 1, prompt 4,096", "ms/token", 4.4, 4.1, 3.85, 5.31),
    "decode-8x1024": SpeedTarget("decode, batch 8, prompt 1,024", "ms/step", 5.2, 4.8, 4.4, 5.92),
    "decode-64x128": SpeedTarget("decode, batch 64, prompt 128", "ms/step", 6.5, 5.6, 5.0, 7.52),
    "decode-64x1024": SpeedTarget(
        "decode, batch 64, prompt 1,024", "ms/step", 12.9, 12.0, 11.3, 14
    ),
    "first-1024": SpeedTarget("first token, prompt 1,024", "ms", 22, 20, 17.4, 24.1),
    "first-4096": SpeedTarget("first token, prompt 4,096", "ms", 84, 78, 73.7, 88.4),
    "trace-500": SpeedTarget(
        "500 requests of the conversation trace, all at once", "s", 29, 25, None, 33.3
    ),
    "startup": SpeedTarget("process start to first token, warm file cache", "s", 20, 8, None),
    "eager-1x128": SpeedTarget(
        "decode, batch 1, prompt 128, beside transformers", "ms/token", 3.8, 3.5, 3.34
    ),
    "gpt2-1x128": SpeedTarget(
        "GPT-2 medium, float16, batch 1, prompt 128", "ms/token", 0.8, 0.45, 0.19
    ),
}

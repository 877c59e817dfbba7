"""Faults of LongRoPE: refused, with layer and module named.

The checkpoint's first list is for 80 tokens: sequences of acceptance are on both sides of it. Those
of a released model are on one side alone, as in ``test_lists_that_no_sequence_reads``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.models import phi3
from modelmill.nn import rotary
from modelmill.nn.rotary import Rotary
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.families.phi3 import LONG, SHORT
from tests.models.family_cases import ROTARY, based, changed, with_scaling
from tests.models.planted_fault import PlantedFault, config_fault, refusal_test

FAMILY = "phi3"
TRAINED, LONGEST = 80, 256
CHANGES = {"original_max_position_embeddings": TRAINED}
FACTOR = math.sqrt(1 + math.log(LONGEST / TRAINED) / math.log(TRAINED))
SHORT_ALONE = ("rotary",)
"""What is named where only sequences of up to 80 tokens are wrong, or those at the bound."""


def scaling(
    modules: tuple[str, ...] = ROTARY, layer: int | None = 0, **changes: Any
) -> PlantedFault:
    """Other values of the scaling."""
    return config_fault(phi3, changed(rope=with_scaling(**changes)), modules, layer)


def tables(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Other frequencies of short and long sequences, [2, D/2]."""
    real = rotary._longrope_inv_freq_table

    def make(spec: Any, plain: torch.Tensor) -> torch.Tensor:
        return change(real(spec, plain))

    return lambda: mock.patch.object(rotary, "_longrope_inv_freq_table", make), ROTARY, 0


def by_length(
    choose: Callable[[int], int], where: tuple[tuple[str, ...], int | None]
) -> PlantedFault:
    """Another choice of the list."""
    plant = lambda: mock.patch.object(  # noqa: E731
        Rotary, "frequency_id_for_length", lambda self, length: choose(length)
    )
    return plant, *where


EVERYWHERE: tuple[tuple[str, ...], int | None] = (ROTARY, 0)
OUTSIDE: tuple[tuple[str, ...], int | None] = (SHORT_ALONE, None)
FAULTS: dict[str, PlantedFault] = {
    "lists exchanged": scaling(short_factor=LONG, long_factor=SHORT),
    "short factors for long": scaling(long_factor=SHORT),
    "long factors for short": scaling(*OUTSIDE, short_factor=LONG),
    "long factors in the other order": scaling(long_factor=LONG[::-1]),
    "short factors in the other order": scaling(*OUTSIDE, short_factor=SHORT[::-1]),
    "long factors one pair later": scaling(long_factor=[LONG[-1], *LONG[:-1]]),
    "one long factor x 1.05": scaling(long_factor=[1.05, *LONG[1:]]),
    "one short factor x 1.05": scaling(*OUTSIDE, short_factor=[*SHORT[:-1], SHORT[-1] * 1.05]),
    "no short factors": scaling(*OUTSIDE, short_factor=[1.0] * 6),
    "long from the bound on": by_length(lambda length: int(length >= TRAINED), OUTSIDE),
    "long one token late": by_length(lambda length: int(length > TRAINED + 1), OUTSIDE),
    "always short": by_length(lambda _: 0, EVERYWHERE),
    "always long": by_length(lambda _: 1, OUTSIDE),
    "bound of the longest length": by_length(lambda length: int(length > LONGEST), EVERYWHERE),
    "frequencies times the factors": tables(lambda table: table[:1] ** 2 / table),
    "temperature forgotten": scaling(attention_factor=1.0),
    "temperature of long sequences' square": scaling(attention_factor=FACTOR**2),
    "temperature of the ratio alone": scaling(
        attention_factor=math.sqrt(1 + math.log(LONGEST / TRAINED))
    ),
    "temperature of the ratio's root": scaling(attention_factor=(LONGEST / TRAINED) ** 0.5),
    "base x 2": config_fault(phi3, changed(rope=based(2.0)), ROTARY),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)


@pytest.mark.parametrize("name", ["short factors for long", "always short", "lists exchanged"])
def test_lists_that_no_sequence_reads(name: str, tmp_path: Path) -> None:
    """All sequences of acceptance are short ones; only the tables differ, or those as well."""
    CASES["phi3"].save(tmp_path / "hf", original_max_position_embeddings=128)
    plant, _, _ = FAULTS[name]
    with plant():
        report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert not written
    exchanged = name == "lists exchanged"
    assert report["module"] in (ROTARY if exchanged else SHORT_ALONE), report["reason"]


def test_a_rotation_that_grows_with_the_length_is_compared_beyond_its_bound(tmp_path: Path) -> None:
    """Dynamic NTK: nothing of acceptance's own sequences is longer than the trained length."""
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 256}
    CASES["internlm3"].save(tmp_path / "hf", **scaled)
    real = rotary._ntk_frequencies
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "right", "float32", "none")
    assert written, report["reason"]
    with mock.patch.object(
        rotary, "_ntk_frequencies", lambda spec, stretch: real(spec, stretch.clamp(max=1.0))
    ):
        report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert not written
    assert (report["layer"], report["module"]) == (None, "rotary"), report["reason"]

"""Faults of OPT's learned positions, whose table begins two rows earlier: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.models import opt
from modelmill.nn.embedding_and_head import TokenAndPositionEmbedding, TokenEmbedding
from modelmill.nn.rotary import RopeSpec
from modelmill.nn.step import Step
from tests.models.family_cases import changed, plus, times
from tests.models.planted_fault import (
    FaultlessEngines,
    FaultyBuild,
    PlantedFault,
    assert_refused_by_name,
    config_fault,
    each_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)

FAMILY = "opt"
EMBED = ("embed",)
Tables = Callable[[TokenAndPositionEmbedding, torch.Tensor, Step], torch.Tensor]


def config(
    modules: str | tuple[str, ...], layer: int | None = None, **changes: Any
) -> PlantedFault:
    return config_fault(opt, changed(**changes), modules, layer)


def first_row(row: int) -> PlantedFault:
    """The table's row of the first position."""
    return config(EMBED, first_position_row=row, max_len=plus(2 - row))


def table(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Another table."""
    return tensor_fault("embed.positions", change, EMBED, None)


def embedding(change: Tables) -> PlantedFault:
    """Another sum; ``change`` gets the module, the tokens' rows and the step."""

    def forward(self: TokenAndPositionEmbedding, ids: torch.Tensor, step: Step) -> torch.Tensor:
        return change(self, TokenEmbedding.forward(self, ids, step), step).to(self.weight.dtype)

    return module_fault(TokenAndPositionEmbedding, forward, EMBED, None)


def rows(self: TokenAndPositionEmbedding, positions: torch.Tensor) -> torch.Tensor:
    return F.embedding(positions + self.first_row, self.positions)


def at(change: Callable[[Step], torch.Tensor]) -> PlantedFault:
    """Rows of other positions."""
    return embedding(lambda self, x, step: x + rows(self, change(step)))


def is_decoding(step: Step) -> bool:
    return step.max_query == 1


def place_in_step(step: Step) -> torch.Tensor:
    """Tokens of a step counted through, whatever sequence they are of."""
    return torch.arange(len(step.positions)).clamp(max=95)


def place_in_chunk(step: Step) -> torch.Tensor:
    """Tokens of each sequence counted from 0 in each step."""
    starts = step.query_start.long()
    lengths = starts.diff()
    return torch.arange(len(step.positions)) - starts[:-1].repeat_interleave(lengths)


def sines(self: TokenAndPositionEmbedding, x: torch.Tensor, step: Step) -> torch.Tensor:
    """arXiv:1706.03762."""
    half = x.shape[1] // 2
    angles = step.positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    del self
    return x + torch.cat((angles.sin(), angles.cos()), 1)


FAULTS: dict[str, PlantedFault] = {
    "from row 0": first_row(0),
    "from row 1": first_row(1),
    "from row 3": first_row(3),
    "no positions": embedding(lambda self, x, step: x),
    "positions added twice": embedding(lambda self, x, step: x + 2 * rows(self, step.positions)),
    "positions subtracted": embedding(lambda self, x, step: x - rows(self, step.positions)),
    "multiplied": embedding(lambda self, x, step: x * rows(self, step.positions)),
    "tokens scaled by the stream's width": embedding(
        lambda self, x, step: 48**0.5 * x + rows(self, step.positions)
    ),
    "the mean of both": embedding(lambda self, x, step: (x + rows(self, step.positions)) / 2),
    "the sum normed": embedding(
        lambda self, x, step: F.layer_norm(x + rows(self, step.positions), (48,))
    ),
    "sines": embedding(sines),
    "the first position for all": at(lambda step: 0 * step.positions),
    "every second position": at(lambda step: step.positions // 2),
    "positions behind 64 from 0 on": at(lambda step: step.positions % 64),
    "positions at most 63": at(lambda step: step.positions.clamp(max=63)),
    "counted from the end": at(lambda step: step.positions.flip(0)),
    "half of the channels": embedding(
        lambda self, x, step: torch.cat(
            (x[:, :24] + rows(self, step.positions)[:, :24], x[:, 24:]), 1
        )
    ),
    "rotated as well": config(("attn.rope_cache.q", "attn.rope_cache.k"), 0,
                              rope=RopeSpec(12, 10000.0, 128)),
    "the table's first rows cut off": table(lambda t: torch.cat((t[2:], t[:2]))),
    "the table in the other order": table(lambda t: t.flip(0)),
    "the table x 1.05": table(times(1.05)),
    "the last row forgotten": table(lambda t: torch.cat((t[:-1], torch.zeros_like(t[:1])))),
    "rows of tokens in the table": table(lambda t: t.roll(1, 1)),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)


FAULTS_OF_STEPS: dict[str, PlantedFault] = {
    "decoded one position early": at(lambda step: step.positions - int(is_decoding(step))),
    "decoded at the first position": at(
        lambda step: step.positions * int(not is_decoding(step))
    ),
    "positions at most 111": at(lambda step: step.positions.clamp(max=111)),
    "the last position is the first": at(lambda step: step.positions % 127),
    "counted through a step": at(place_in_step),
    "counted from 0 in each step": at(place_in_chunk),
}  # fmt: skip


@each_fault(FAULTS_OF_STEPS)
def test_a_fault_of_some_steps_is_refused_by_name(
    faulty: FaultyBuild, checkpoint: Path, faultless: FaultlessEngines, tmp_path: Path
) -> None:
    """Wrong only where whole sequences run in a batch, in parts and decoded, or behind them."""
    whole = faulty._replace(is_shortened=False)
    assert_refused_by_name(whole, FAMILY, faultless, checkpoint, tmp_path / "e")

"""Faults where a part of each head rotates: refused, with layer and module named.

All positions counted from 1 are no fault: scores depend on differences of positions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modelmill.models import phi
from modelmill.nn.attention import RopeAndCache, RopeCosSin
from modelmill.nn.step import Step
from tests.models.family_cases import QK, ROTARY, changed, with_dim
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    rule_fault,
)

FAMILY = "phi"
HEADS, KV_HEADS, DIM = 4, 2, 16
TURNED = 8
"""Channels of a head that rotate."""
QUERIES, KEYS = "attn.rope_cache.q", "attn.rope_cache.k"
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
real = RopeAndCache.forward


def angles(change: Callable[[torch.Tensor], torch.Tensor], base: float = 1e4) -> PlantedFault:
    """Other angles of the pairs of a head; ``change`` gets the numbers of the rotated ones.

    It returns exponents of 1 / base, as many as a head has pairs; infinite ones do not rotate.
    """

    def forward(self: RopeAndCache, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> Any:
        exponents = change(torch.arange(TURNED // 2).float())
        turned = step.positions[:, None] * base**-exponents
        return real(self, qkv, replace(rope, cos=turned.cos(), sin=turned.sin()), step)

    return module_fault(RopeAndCache, forward, ROTARY)


def alone(exponents: torch.Tensor) -> torch.Tensor:
    """The rotated pairs' exponents, and none for the others."""
    return torch.cat((exponents, torch.full((DIM // 2 - len(exponents),), torch.inf)))


def tables(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> PlantedFault:
    """Other cosines and sines, made from the right ones, [T, D/2] each."""

    def forward(self: RopeAndCache, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> Any:
        assert rope.cos is not None
        assert rope.sin is not None
        cos, sin = change(rope.cos, rope.sin)
        return real(self, qkv, replace(rope, cos=cos, sin=sin), step)

    return module_fault(RopeAndCache, forward, ROTARY)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D], rotated as is right."""
    first, second = heads.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(heads.dtype)


def rotation(
    queries: Rotation = rotate,
    keys: Rotation = rotate,
    values: Rotation | None = None,
    names: str | tuple[str, ...] = ROTARY,
) -> PlantedFault:
    """Another rotation of queries, of keys, or of values."""

    def forward(self: RopeAndCache, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> Any:
        assert rope.cos is not None
        assert rope.sin is not None
        parts = qkv.unflatten(1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        changes = queries, keys, values or (lambda heads, cos, sin: heads)
        turned = [
            change(part, rope.cos, rope.sin) for change, part in zip(changes, parts, strict=True)
        ]
        return real(self, torch.cat(turned, 1).flatten(1), RopeCosSin(), step)

    return module_fault(RopeAndCache, forward, names)


def not_at_all(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    del cos, sin
    return heads


def one_position_later(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(heads, cos.roll(-1, 0), sin.roll(-1, 0))


def first_head(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first channels of a row instead of those of each head."""
    return torch.cat((rotate(heads[:, :1], cos, sin), heads[:, 1:]), 1)


def first_half_of_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half of the heads instead of half of each."""
    count = heads.shape[1] // 2
    return torch.cat((rotate(heads[:, :count], cos, sin), heads[:, count:]), 1)


def others_first(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The channels that do not rotate stand in front of those that do."""
    pairs = rotate(heads, cos, sin).unflatten(-1, (2, 2, TURNED // 2))
    return pairs.flip(-2).flatten(-3)


def others_dropped(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The channels that do not rotate are 0 in the keys."""
    pairs = rotate(heads, cos, sin).unflatten(-1, (2, 2, TURNED // 2)).clone()
    pairs[..., 1, :] = 0
    return pairs.flatten(-3)


def rows(change: Callable[[str], str]) -> PlantedFault:
    """Rows of q and k in another order than the rotation's; ``change`` gets the step's name."""

    def rule(each: Any) -> Any:
        steps = [change(step) if "rope_rows" in step else step for step in each.how.split("+")]
        return replace(each, how="+".join(step for step in steps if step))

    return rule_fault(phi, rule, QK)


def channels(count: int) -> PlantedFault:
    """Another number of rotated channels."""
    return config_fault(phi, changed(rope=with_dim(count)), QK)


FAULTS: dict[str, PlantedFault] = {
    "all channels": channels(16),
    "half as many channels": channels(4),
    "a pair too many": channels(10),
    "a pair too few": channels(6),
    "no channels": rotation(not_at_all, not_at_all),
    "all channels, in the order of a part": angles(lambda i: torch.arange(8) / 8),
    "the last channels": tables(lambda cos, sin: (cos.roll(4, 1), sin.roll(4, 1))),
    "exponents of whole heads": angles(lambda i: alone(2 * i / DIM)),
    "exponents of pairs": angles(lambda i: alone(2 * i / (TURNED // 2))),
    "exponents from the first on": angles(lambda i: alone((2 * i + 2) / TURNED)),
    "base x 2": angles(lambda i: alone(2 * i / TURNED), 2e4),
    "slowest first": angles(lambda i: alone(2 * i.flip(0) / TURNED)),
    "angles in pairs": angles(lambda i: alone(2 * i[:2].repeat_interleave(2) / TURNED)),
    "the others with the same angles": angles(lambda i: (2 * i / TURNED).repeat(2)),
    "the others times 0": tables(lambda cos, sin: (cos * (sin != 0), sin)),
    "backwards": tables(lambda cos, sin: (cos, -sin)),
    "cosine and sine exchanged": tables(lambda cos, sin: (sin, cos)),
    "neighbouring channels": rows(lambda step: step.replace("halves", "neighbours")),
    "channels half a head apart": rows(lambda step: ""),
    "queries not rotated": rotation(queries=not_at_all, names=QUERIES),
    "keys not rotated": rotation(keys=not_at_all, names=KEYS),
    "values, too": rotation(values=rotate, names="attn.rope_cache.v"),
    "keys one position later": rotation(keys=one_position_later, names=KEYS),
    "keys' parts in the other order": rotation(keys=others_first, names=KEYS),
    "keys of rotated channels alone": rotation(keys=others_dropped, names=KEYS),
    "the first head alone": rotation(first_head, first_head),
    "half of the heads": rotation(first_half_of_heads, first_half_of_heads),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)

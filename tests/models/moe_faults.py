"""Planted faults that every family with experts has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.family_cases import (
    Change,
    FamilyCase,
    PlantedFault,
    changed,
    decoder_family,
    fault,
)


def with_router(**changes: Any) -> Change:
    """Changes the router of a mixture of experts; a callable gets the field's value."""
    return changed(router=changed(**changes))


def one_fewer(count: int) -> int:
    """One less."""
    return count - 1


def flipped(value: bool) -> bool:
    """The other one."""
    return not value


MOE_KV_TOLERANCE = 0.2  # near a tie, the rounding of a key decides between two experts
ROUTING = "mlp.routing"
MOE_FAULTS: dict[str, PlantedFault] = {
    "renormalized or not": fault(ROUTING, moe=with_router(renormalize=flipped)),
    "one expert fewer": fault(ROUTING, moe=with_router(top_k=one_fewer)),
    "weights x 1.05": fault(ROUTING, moe=with_router(scale=1.05)),
    "sigmoid for softmax": fault(ROUTING, moe=with_router(scores="sigmoid")),
}
GROUPED_ROUTER_FAULTS: dict[str, PlantedFault] = {
    **{name: each for name, each in MOE_FAULTS.items() if "sigmoid" not in name},
    "softmax for sigmoid": fault(ROUTING, moe=with_router(scores="softmax")),
    "no groups": fault(ROUTING, moe=with_router(groups=1, top_groups=1)),
    "one group fewer": fault(ROUTING, moe=with_router(top_groups=one_fewer, top_k=2)),
}
SIGMOID_ROUTER_FAULTS = {
    name: each for name, each in GROUPED_ROUTER_FAULTS.items() if "group" not in name
}


def moe_family(
    model_type: str,
    base: Mapping[str, Any],
    switches: tuple[Mapping[str, Any], ...],
    refused: Mapping[str, Any],
    faults: Mapping[str, PlantedFault] = MOE_FAULTS,
    **more: Any,
) -> FamilyCase:
    """A family of decoders with experts (``decoder_family``)."""
    more = {"kv_tolerance": MOE_KV_TOLERANCE, **more}
    return decoder_family(model_type, base, switches, refused, faults, **more)

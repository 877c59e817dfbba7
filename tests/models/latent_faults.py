"""Planted faults of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.latent_attention import (
    LatentAttention,
    LatentAttentionCore,
    LatentAttentionSpec,
    RopeAndLatentCache,
)
from tests.models.family_cases import Change, PlantedFault, changed, fault, times

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.9,
        "mscale_all_dim": 0.7, "beta_fast": 4, "beta_slow": 1}  # fmt: skip


def with_module(name: str, module: Callable[[LatentAttentionSpec, int], Any]) -> Change:
    """Latent attention, one of whose modules is another."""

    class Changed(LatentAttentionSpec):
        def build_module(self, cache_index: int) -> LatentAttention:
            made = super().build_module(cache_index)
            setattr(made, name, module(self, cache_index))
            return made

    return lambda spec: Changed(**vars(spec))


class ValuesFirst(LatentAttentionCore):
    """The rows of a head's values in front of its keys'."""

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat(super().up_projections(), 1)
        value_up, key_up = both.split([self.spec.value_dim, self.spec.nope_dim], 1)
        return key_up, value_up


class MovedRotation(RopeAndLatentCache):
    """Other channels of queries and latent vectors are rotated."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: RopeCosSin) -> torch.Tensor:
        return super()._rotate(x.roll(2, -1), begin, rope).roll(-2, -1)


LATENT_FAULTS: dict[str, PlantedFault] = {
    "pairs half a head apart": fault(
        ("attn.rope_cache.q", "attn.rope_cache.k"), latent_attention=changed(neighbours=False)
    ),
    "scores x 1.5": fault("attn.core", latent_attention=changed(scale=times(1.5))),
    "values in the place of keys": fault(
        "attn.core", latent_attention=with_module("core", ValuesFirst)
    ),
    "rotated channels moved by two": fault(
        ("attn.rope_cache.q", "attn.rope_cache.k"),
        latent_attention=with_module("rope_cache", MovedRotation),
    ),
    "no factor of YaRN": fault(
        "attn.core", case={"rope_scaling": YARN}, latent_attention=changed(scale=20**-0.5)
    ),
}

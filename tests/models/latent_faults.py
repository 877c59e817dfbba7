"""Planted faults of latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.latent_attention import (
    LatentAttention,
    LatentAttentionSpec,
    LatentCache,
    LatentCore,
)
from tests.models.family_cases import Change, PlantedFault, fault, times

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.9,
        "mscale_all_dim": 0.7, "beta_fast": 4, "beta_slow": 1}  # fmt: skip


def latent(**changes: Any) -> Change:
    """Changes the latent attention; a callable gets the field's value."""

    def change(spec: Any) -> Any:
        values = {
            key: value(getattr(spec, key)) if callable(value) else value
            for key, value in changes.items()
        }
        return replace(spec, **values)

    return change


class ValuesFirst(LatentAttentionSpec):
    """The rows of a head's values in front of its keys'."""

    def make(self, cache_index: int) -> LatentAttention:
        module = super().make(cache_index)
        module.core = ValuesFirstCore(self, cache_index)
        return module


class ValuesFirstCore(LatentCore):
    """See ``ValuesFirst``."""

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat(super().up_projections(), 1)
        value_up, key_up = both.split([self.spec.value_dim, self.spec.nope_dim], 1)
        return key_up, value_up


class MovedRotation(LatentAttentionSpec):
    """Other channels of queries and latent vectors are rotated."""

    def make(self, cache_index: int) -> LatentAttention:
        module = super().make(cache_index)
        module.rope_cache = MovedRotationCache(self, cache_index)
        return module


class MovedRotationCache(LatentCache):
    """See ``MovedRotation``."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: RopeCosSin) -> torch.Tensor:
        return super()._rotate(x.roll(2, -1), begin, rope).roll(-2, -1)


LATENT_FAULTS: dict[str, PlantedFault] = {
    "pairs half a head apart": fault(
        ("attn.rope_cache.q", "attn.rope_cache.k"), latent_attention=latent(neighbours=False)
    ),
    "scores x 1.5": fault("attn.core", latent_attention=latent(scale=times(1.5))),
    "values in the place of keys": fault(
        "attn.core", latent_attention=lambda spec: ValuesFirst(**vars(spec))
    ),
    "rotated channels moved by two": fault(
        ("attn.rope_cache.q", "attn.rope_cache.k"),
        latent_attention=lambda spec: MovedRotation(**vars(spec)),
    ),
    "no factor of YaRN": fault(
        "attn.core", case={"rope_scaling": YARN}, latent_attention=latent(scale=20**-0.5)
    ),
}

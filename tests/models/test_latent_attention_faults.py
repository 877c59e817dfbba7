"""Faults of latent attention: refused, with layer and module named.

A DeepSeek-V3 without experts, whose rotation is YaRN's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from modelmill.models import deepseek_v3
from modelmill.nn import latent_attention
from modelmill.nn.latent_attention import (
    LatentAttention,
    LatentAttentionCore,
    LatentNorm,
    RopeAndLatentCache,
)
from modelmill.nn.norm import NormWithoutResidual
from tests.models import planted_fault as planted
from tests.models.family_cases import ROTARY, changed, times, with_scaling
from tests.models.latent_faults import YARN, MovedRotation, ValuesFirst, with_module

FAMILY = "deepseek_v3"
CHANGES = {"rope_scaling": YARN, "first_k_dense_replace": 2}
LAYER = "layers.1.attn"
HEADS, NOPE, ROPE, VALUE, RANK = 4, 12, 8, 10, 24
TEMPER = 1 + 0.1 * 0.7 * torch.tensor(4.0).log().item()
CORE, NORM = ("attn.core",), ("attn.kv_a_norm.kv_a_norm",)
KV_A = "attn.kv_a_proj", "attn.k_pe_proj"


def attention(modules: tuple[str, ...], **changes: Any) -> planted.PlantedFault:
    """Another config of latent attention."""
    change = changed(latent_attention=changed(**changes))
    return planted.config_fault(deepseek_v3, change, modules)


def module(modules: tuple[str, ...], name: str, cls: Any) -> planted.PlantedFault:
    """Another class of one of its modules."""
    change = changed(latent_attention=with_module(name, cls))
    return planted.config_fault(deepseek_v3, change, modules)


def rope(change: Any) -> planted.PlantedFault:
    """Another rotation; the factor of the scores stays."""
    return planted.config_fault(deepseek_v3, changed(rope=change), ROTARY)


def tensor(
    name: str, modules: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> planted.PlantedFault:
    """Another tensor than the checkpoint's, in one layer."""
    return planted.tensor_fault(f"{LAYER}.{name}", change, modules, 1)


def all_keys_first(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all heads' keys, then those of all values, read as a head's after another's."""
    by_head = rows.unflatten(0, (HEADS, NOPE + VALUE))
    return torch.cat((by_head[:, :NOPE].flatten(0, 1), by_head[:, NOPE:].flatten(0, 1)))


def rotated_queries_first(rows: torch.Tensor) -> torch.Tensor:
    """The rotated channels of each head in front of the others."""
    return rows.unflatten(0, (HEADS, NOPE + ROPE)).roll(ROPE, 1).flatten(0, 1)


class OtherHeadsKeys(LatentAttentionCore):
    """Queries absorb the keys of the next head."""

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        key_up, value_up = super().up_projections()
        return key_up.roll(1, 0), value_up


class OtherHeadsValues(LatentAttentionCore):
    """Outputs are those of the next head."""

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        key_up, value_up = super().up_projections()
        return key_up, value_up.roll(1, 0)


class PlainKeys(RopeAndLatentCache):
    """Queries rotate, keys do not."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: Any) -> torch.Tensor:
        return x if begin == RANK else super()._rotate(x, begin, rope)


class PlainQueries(RopeAndLatentCache):
    """Keys rotate, queries do not."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: Any) -> torch.Tensor:
        return x if begin == NOPE else super()._rotate(x, begin, rope)


class LostRotatedKeys(RopeAndLatentCache):
    """The cache holds the latent vector alone."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: Any) -> torch.Tensor:
        turned = super()._rotate(x, begin, rope)
        if begin == RANK:
            turned[..., RANK:] = 0
        return turned


class BackwardRotation(RopeAndLatentCache):
    """The angles' sign."""

    def _rotate(self, x: torch.Tensor, begin: int, rope: Any) -> torch.Tensor:
        assert rope.sin is not None
        return super()._rotate(x, begin, replace(rope, sin=-rope.sin))


def pass_through(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    del self, step
    return x


def norm_over_all(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    """The mean square of latent vector and rotated key."""
    del step
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    normed = x[:, :RANK] * scale * self.weight.float()
    return torch.cat((normed.to(x.dtype), x[:, RANK:]), -1)


def norm_bypassed(self: Any, x: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    """Every module is right, but the cache gets the latent vector in front of its norm."""
    q = self.q_proj(self.q_a_norm(self.q_a_proj(x, step), step), step)
    latent = self.kv_a_proj(x, step)
    self.kv_a_norm(latent, step)
    return self.o_proj(self.core(self.rope_cache(q, latent, rope, step), step), step)


FAULTS: dict[str, planted.PlantedFault] = {
    "latent split: rotated key first": tensor("kv_a_proj.weight", KV_A, lambda t: t.roll(ROPE, 0)),
    "latent split off by one": tensor("kv_a_proj.weight", KV_A, lambda t: t.roll(1, 0)),
    "keys of all heads in front of values": tensor("core.kv_b", CORE, all_keys_first),
    "values in the place of keys": module(CORE, "core", ValuesFirst),
    "keys of other heads absorbed": module(CORE, "core", OtherHeadsKeys),
    "values of other heads": module(CORE, "core", OtherHeadsValues),
    "an up-projection x 1.05": tensor("core.kv_b", CORE, lambda t: t * 1.05),
    "rotated queries first": tensor("q_proj.weight", ("attn.q_proj",), rotated_queries_first),
    "key not rotated": module(ROTARY, "rope_cache", PlainKeys),
    "queries not rotated": module(ROTARY, "rope_cache", PlainQueries),
    "rotated key forgotten": module(ROTARY, "rope_cache", LostRotatedKeys),
    "rotated channels moved by two": module(ROTARY, "rope_cache", MovedRotation),
    "rotation backwards": module(ROTARY, "rope_cache", BackwardRotation),
    "pairs half a head apart": attention(ROTARY, neighbours=False),
    "scores without YaRN's factor": attention(CORE, scale=times(TEMPER**-2)),
    "YaRN's factor once": attention(CORE, scale=times(1 / TEMPER)),
    "scores scaled by the unrotated channels": attention(
        CORE, scale=times(((NOPE + ROPE) / NOPE) ** 0.5)
    ),
    "scores scaled by the cached channels": attention(
        CORE, scale=times(((NOPE + ROPE) / (RANK + ROPE)) ** 0.5)
    ),
    "YaRN's factor of the rotation": rope(with_scaling(mscale=1.4)),
    "YaRN's trained length": rope(with_scaling(original_max_position_embeddings=32)),
    "norm of keys' vector forgotten": planted.module_fault(LatentNorm, pass_through, NORM),
    "norm over the rotated key, too": planted.module_fault(LatentNorm, norm_over_all, NORM),
    "norm of keys' vector not used": planted.module_fault(
        LatentAttention, norm_bypassed, "attn.rope_cache.input"
    ),
    "norm of queries' vector forgotten": planted.module_fault(
        NormWithoutResidual, pass_through, "attn.q_a_norm"
    ),
    "eps of latent norms x 10": (
        lambda: mock.patch.object(latent_attention, "NORM_EPS", 1e-5),
        ("attn.q_a_norm.eps", "attn.kv_a_norm.eps"), 0,
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = planted.refusal_test(FAULTS)

"""Faults of clipped queries, keys and values: refused, with layer and module named.

A bound as a tensor of the rows' dtype, and clipping twice, are no faults: the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from modelmill.models import olmo
from modelmill.nn.attention import Attention, QKVClip, RopeAndCache, RopeCosSin
from modelmill.nn.step import Step
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.family_cases import ROTARY, changed, times
from tests.models.planted_fault import (
    RECIPES,
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
)

FAMILY = "olmo"
CHANGES = {"attention_bias": True}
Q, K, V = (f"attn.qkv_clip.{part}_clipped" for part in "qkv")
EACH = (Q, K, V)
WIDTHS = (48, 24, 24)
"""Of q, k and v, in heads of 12 channels."""

real_attention, real_rope_cache = Attention.forward, RopeAndCache.forward
Clip = Callable[[torch.Tensor, float], torch.Tensor]


def right(x: torch.Tensor, bound: float) -> torch.Tensor:
    return x.clamp(-bound, bound)


def clip(change: Clip, modules: str | tuple[str, ...] = EACH) -> PlantedFault:
    """Another clip of all values; it gets them and the bound."""

    def forward(self: QKVClip, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        del step
        return change(qkv, self.bound)

    return module_fault(QKVClip, forward, modules)


def parts(*changes: Clip) -> Clip:
    """Another clip of q, of k and of v."""

    def change(qkv: torch.Tensor, bound: float) -> torch.Tensor:
        split = qkv.split(WIDTHS, 1)
        return torch.cat([each(part, bound) for each, part in zip(changes, split, strict=True)], 1)

    return change


def not_at_all(x: torch.Tensor, bound: float) -> torch.Tensor:
    del bound
    return x


def by_the_largest(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Each head scaled so that its largest value is within the bound."""
    heads = x.unflatten(1, (-1, 12))
    return (heads * (bound / heads.abs().amax(-1, keepdim=True)).clamp(max=1)).flatten(1)


def by_the_norm(x: torch.Tensor, bound: float) -> torch.Tensor:
    """As gradients are clipped."""
    return x * (bound / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def elsewhere(
    change: Callable[[Attention, torch.Tensor, RopeCosSin, Step], torch.Tensor],
    reader: str = "attn.rope_cache.input",
    layer: int = 0,
) -> PlantedFault:
    """All modules right, and joined in another way; ``reader``: what gets another value."""
    return module_fault(Attention, change, reader, layer)


def bound_of(attention: Attention) -> float:
    assert attention.qkv_clip is not None
    return attention.qkv_clip.bound


def in_front_of_the_projection(
    self: Attention, x: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    qkv = self.qkv_proj(right(x, bound_of(self)), step)
    return self.o_proj(self.core(self.rope_cache(qkv, rope, step), step), step)


def in_front_of_the_bias(
    self: Attention, x: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    bias = self.qkv_proj.bias
    assert bias is not None
    qkv = right(self.qkv_proj(x, step) - bias, bound_of(self)) + bias
    return self.o_proj(self.core(self.rope_cache(qkv, rope, step), step), step)


def behind_attention(
    self: Attention, x: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    qkv = self.qkv_proj(x, step)
    attended = self.core(self.rope_cache(qkv, rope, step), step)
    return self.o_proj(right(attended, bound_of(self)), step)


def in_the_first_layer_alone(
    self: Attention, x: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    if self.rope_cache.cache_index:
        self.qkv_clip = None
    return real_attention(self, x, rope, step)


def behind_the_rotation(
    self: Attention, x: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    qkv = self.qkv_proj(x, step)
    turned = torch.cat((rotated(qkv[:, :72], rope), qkv[:, 72:]), 1)
    stored = self.rope_cache(right(turned, bound_of(self)), RopeCosSin(), step)
    return self.o_proj(self.core(stored, step), step)


def rotated(x: torch.Tensor, rope: RopeCosSin) -> torch.Tensor:
    assert rope.cos is not None
    assert rope.sin is not None
    first, second = x.float().unflatten(1, (-1, 2, 6)).unbind(2)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), 2)
    return turned.flatten(1).to(x.dtype)


def clipped_again_as_scaled(
    self: RopeAndCache, qkv: torch.Tensor, rope: RopeCosSin, step: Step
) -> torch.Tensor:
    return right(real_rope_cache(self, qkv, rope, step), 1.5 * 12**-0.5)


def config(modules: str | tuple[str, ...], **changes: Any) -> PlantedFault:
    return config_fault(olmo, changed(**changes), modules)


FAULTS: dict[str, PlantedFault] = {
    "no clip": config(ROTARY, qkv_clip=None),
    "no clip behind the first layer": elsewhere(in_the_first_layer_alone, layer=1),
    "queries not clipped": clip(parts(not_at_all, right, right), Q),
    "keys not clipped": clip(parts(right, not_at_all, right), K),
    "values not clipped": clip(parts(right, right, not_at_all), V),
    "queries, and a half of the keys": clip(
        # three times as many columns as values have, where there are fewer KV heads
        lambda x, bound: torch.cat((right(x[:, :60], bound), x[:, 60:]), 1), K
    ),
    "no lower bound": clip(lambda x, bound: x.clamp(max=bound)),
    "no upper bound": clip(lambda x, bound: x.clamp(min=-bound)),
    "0 for the lower bound": clip(lambda x, bound: x.clamp(0, bound)),
    "bound x 1.1": config(EACH, qkv_clip=times(1.1)),
    "a whole number for the bound": config(EACH, qkv_clip=lambda bound: float(int(bound))),
    "bound scaled like scores": config(EACH, qkv_clip=times(12**-0.5)),
    "the bound's square": config(EACH, qkv_clip=lambda bound: bound**2),
    "a soft cap": clip(lambda x, bound: bound * (x / bound).tanh()),
    "0 beyond the bound": clip(lambda x, bound: x.where(x.abs() <= bound, 0.0)),
    "values less the bound": clip(lambda x, bound: F.softshrink(x, bound)),
    "heads scaled to the bound": clip(by_the_largest),
    "rows' norms clipped": clip(by_the_norm),
    "in front of the projection": elsewhere(in_front_of_the_projection, "attn.qkv_proj.input"),
    "in front of the bias": elsewhere(in_front_of_the_bias),
    "behind the rotation": elsewhere(behind_the_rotation),
    "behind attention": elsewhere(behind_attention),
    "queries clipped as they are scaled": module_fault(
        RopeAndCache, clipped_again_as_scaled, "attn.rope_cache.q"
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("no clip", "attn.qkv_clip"),
        ("queries not clipped", "attn.qkv_clip.bound"),
        ("values not clipped", "attn.qkv_clip.bound"),
        ("no lower bound", "attn.qkv_clip.bound"),
        ("bound x 1.1", "attn.qkv_clip.bound"),
        ("0 beyond the bound", "attn.qkv_clip.bound"),
    ],
)
def test_a_bound_that_no_text_reaches(
    name: str, module: str, dtype: str, recipe: str, far_bound: Path, tmp_path: Path
) -> None:
    """Released checkpoints have bounds of 6 and 8, which few tokens reach."""
    plant, _, _ = FAULTS[name]
    with plant():
        report, written = build_and_accept(
            far_bound, tmp_path / "e", dtype, recipe, **RECIPES[recipe]
        )
    assert not written
    assert (report["layer"], report["module"]) == (0, module), report["reason"]


@pytest.fixture(scope="module")
def far_bound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far_bound")
    CASES[FAMILY].save(folder, clip_qkv=20.0)
    return folder


@pytest.mark.parametrize("family", ["olmo", "mpt", "olmoe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_with_such_a_bound_is_accepted(
    family: str, dtype: str, tmp_path: Path
) -> None:
    far = {"attn_config": {"clip_qkv": 20.0}} if family == "mpt" else {"clip_qkv": 20.0}
    CASES[family].save(tmp_path / "hf", **far)
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", dtype, "none")
    assert written, report["reason"]

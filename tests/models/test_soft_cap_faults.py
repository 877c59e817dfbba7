"""Faults of Gemma 2's soft caps, norms and scales: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from modelmill.models import gemma2
from modelmill.nn.attention import AttentionCore
from modelmill.nn.embedding_and_head import LMHead, TokenEmbedding
from modelmill.nn.norm import NormWithoutResidual
from tests.models import planted_fault as planted
from tests.models.family_cases import changed, times

FAMILY = "gemma2"
CHANGES = {"num_hidden_layers": 2}
CORE, HEAD, EMBED = ("attn.core",), ("head",), ("embed",)


def config(modules: tuple[str, ...], layer: int | None = 0, **changes: Any) -> planted.PlantedFault:
    """Another config than the checkpoint's."""
    return planted.config_fault(gemma2, changed(**changes), modules, layer)


def rule(module: str, change: Callable[[Any], Any], layer: int | None = 0) -> planted.PlantedFault:
    """Some tensors made by another rule."""
    return planted.rule_fault(gemma2, change, module, layer)


def logits(change: Callable[[torch.Tensor, float], torch.Tensor]) -> planted.PlantedFault:
    """Another bound of the logits."""

    def scale_and_softcap_logits(self: Any, x: torch.Tensor) -> torch.Tensor:
        return change(x, self.softcap)

    return (
        lambda: mock.patch.object(LMHead, "scale_and_softcap_logits", scale_and_softcap_logits),
        HEAD,
        None,
    )


def as_stored(*paths: str) -> Callable[[Any], Any]:
    """The norms of these names, or all, without the 1 that they are stored less."""

    def change(each: Any) -> Any:
        if paths and each.target.split(".")[-2] not in paths:
            return each
        return replace(each, how=each.how.replace("+plus_one", ""))

    return change


def exchanged(first: str, second: str) -> Callable[[Any], Any]:
    """Two norms of each layer in each other's places."""
    places = {first: second, second: first}

    def change(each: Any) -> Any:
        stem, _, path = each.target.removesuffix(".weight").rpartition(".")
        if path not in places:
            return each
        return replace(each, target=f"{stem}.{places[path]}.weight")

    return change


def uncapped_in_the_second_layer() -> Any:
    real = AttentionCore._score_mods

    def score_mods(self: Any, *args: Any) -> Any:
        mods = real(self, *args)
        return mods._replace(softcap=None) if self.cache_index == 1 else mods

    return mock.patch.object(AttentionCore, "_score_mods", score_mods)


def pass_through(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    del self, step
    return x


def scaled_twice(self: Any, ids: torch.Tensor, step: Any) -> torch.Tensor:
    return real_embedding(self, ids, step) * self.scale


real_embedding = TokenEmbedding.forward
FAULTS: dict[str, planted.PlantedFault] = {
    "no cap of scores": config(CORE, attention_softcap=None),
    "a cap of scores x 1.2": config(CORE, attention_softcap=times(1.2)),
    # c · tanh(s / c) of the raw scores, then their scale
    "scores bounded in front of their scale": config(CORE, attention_softcap=times(0.5)),
    "no cap of scores in one layer": (uncapped_in_the_second_layer, CORE, 1),
    "caps exchanged": config(CORE, attention_softcap=4.0, logit_softcap=3.0),
    "no cap of logits": config(HEAD, None, logit_softcap=None),
    "a cap of logits x 1.1": config(HEAD, None, logit_softcap=times(1.1)),
    "logits cut off at their bound": logits(lambda x, cap: x.clamp(-cap, cap)),
    "bounded logits not scaled back": logits(lambda x, cap: (x / cap).tanh()),
    "no norm stored less 1": rule("attn_norm", as_stored()),
    "norms behind attention as stored": rule("attn_post", as_stored("attn_post")),
    "norms in front of the MLP as stored": rule("mlp_norm", as_stored("mlp_norm")),
    "last norm as stored": rule("norm", as_stored("norm"), None),
    "a norm plus 2": planted.tensor_fault(
        "layers.1.mlp_post.weight", lambda t: t + 1, "mlp_post", 1
    ),
    "norms behind the branches exchanged": rule("attn_post", exchanged("attn_post", "mlp_post")),
    "norms behind attention and in front of the MLP exchanged": rule(
        "attn_post", exchanged("attn_post", "mlp_norm")
    ),
    "norms behind the branches forgotten": planted.module_fault(
        NormWithoutResidual, pass_through, "attn_post"
    ),
    "embeddings not scaled": config(EMBED, None, embedding_scale=None),
    "embeddings scaled twice": planted.module_fault(TokenEmbedding, scaled_twice, EMBED, None),
    "scores scaled by the channels of a head": config(CORE, attention_scale=None),
    "window + 1": config(CORE, windows=(21, None)),
    "windows one layer later": config(CORE, windows=(None, 20)),
    "another activation": config(("mlp.act",), activation="silu"),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = planted.refusal_test(FAULTS)

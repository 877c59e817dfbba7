"""Keys of a config that name a router's rule: what the family computes is fine, others refused."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.builder.router_keys import SCORE_KEYS, router_rule_values
from modelmill.core.errors import CheckpointError
from modelmill.nn.moe import SIGMOID, SOFTMAX
from tests.models.all_families import CASES
from tests.models.config_keys import read_config

WITH_EXPERTS = {
    name: sizes.moe.router
    for name, case in CASES.items()
    if getattr(sizes := read_config(case.raw())[0], "moe", None) is not None
}
RULES: dict[str, Any] = {
    **dict.fromkeys(SCORE_KEYS, "tanh"),
    "topk_method": "weird",
    "routed_scaling_factor": 7.5,
    "n_group": 3,
    "use_routing_bias": "maybe",
}


# a factor that the family's router does have
READ = dict.fromkeys(
    (
        "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "kimi_k2",
        "lfm2_moe", "mistral4", "nemotron_h", "sarvam_mla",
        "sarvam_moe", "solar_open",
    ),
    ("routed_scaling_factor",),
)  # fmt: skip

# what no method of the case reads
UNREAD = {"deepseek_v2": ("n_group",)}


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_another_rule_is_refused_by_name(family: str) -> None:
    raw = CASES[family].raw()
    for key, value in RULES.items():
        if key in READ.get(family, ()):
            assert read_config({**raw, key: value})[0].moe.router != WITH_EXPERTS[family]
            continue
        if key in UNREAD.get(family, ()):
            assert read_config({**raw, key: value}) == read_config(raw)
            continue
        with pytest.raises(CheckpointError, match=key):
            read_config({**raw, key: value})


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_families_own_rule_is_fine(family: str) -> None:
    raw, router = CASES[family].raw(), WITH_EXPERTS[family]
    method = "greedy" if router.groups == 1 else "group_limited_greedy"
    same: dict[str, Any] = {
        **dict.fromkeys(SCORE_KEYS, router.scores),
        "routed_scaling_factor": router.scale,
        "topk_method": "noaux_tc" if router.selection_bias else method,
    }
    before = read_config(raw)[1]
    for key, value in same.items():
        if key not in raw:
            sizes, lines = read_config({**raw, key: value})
            assert (sizes.moe.router, lines) == (router, before), key


def test_both_scores_are_among_the_families() -> None:
    assert {router.scores for router in WITH_EXPERTS.values()} >= {SIGMOID, SOFTMAX}


def test_a_model_without_experts_has_no_router() -> None:
    sizes, lines = read_config({**CASES["starcoder2"].raw(), "scoring_func": "sigmoid"})
    assert router_rule_values(sizes) == {}
    assert "scoring_func is a key that is not read and has no effect" in lines[0]


def test_a_clamp_of_the_gate_is_not_ignored() -> None:
    with pytest.raises(CheckpointError, match=r"swiglu_limit=5\.0 changes what is computed"):
        read_config({**CASES["mixtral"].raw(), "swiglu_limit": 5.0})


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "dots1"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_two_numbers_of_experts_contradict_each_other(family: str, key: str) -> None:
    raw = CASES[family].raw()
    count = raw["n_routed_experts"]
    for value in (0, 1, count + 1):
        with pytest.raises(
            CheckpointError, match=f"{key}={value} contradicts n_routed_experts, which makes it"
        ):
            read_config({**raw, key: value})
    assert read_config({**raw, key: count})[1] == []


@pytest.mark.parametrize("value", [0, 1])
def test_n_routed_experts_beside_another_key(value: int) -> None:
    with pytest.raises(
        CheckpointError, match=f"n_routed_experts={value} contradicts num_local_experts"
    ):
        read_config({**CASES["mixtral"].raw(), "n_routed_experts": value})


def test_an_interval_beside_layer_types() -> None:
    raw = CASES["qwen3_next"].raw()
    types = ["linear_attention", "full_attention"]
    assert read_config({**raw, "layer_types": types})[1] == read_config(raw)[1]
    with pytest.raises(
        CheckpointError,
        match="full_attention_interval=2 contradicts layer_types, which names layer 0 full_att",
    ):
        read_config({**raw, "layer_types": types[::-1]})
    read_config({**raw, "layer_types": types[::-1], "full_attention_interval": None})

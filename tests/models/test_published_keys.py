"""Keys of published config.json files beside those of the configuration class.

Those that change nothing are not named, and values that would change something are refused. Found
in files of Codestral Mamba, Qwen3-Coder-480B, Qwen3.6-27B, Phi-4-mini, K-EXAONE and others.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modelmill.accept.reference.exaone_moe import ExaoneMoeReference
from modelmill.core.errors import CheckpointError
from tests.models.all_families import CASES
from tests.models.config_keys import read_config

pytest.importorskip("transformers")

SOURCE = cast(Any, SimpleNamespace(dtype=torch.float32, device="cpu"))
"""What a reference asks of its tensors before it reads one."""
AUTO_MAP = {"auto_map": {"AutoConfig": "configuration_some.SomeConfig"}}
IDLE: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {"norm_before_gate": True, "time_step_init_scheme": "random", "time_step_scale": 1,
                "intermediate_size": 96}),
    ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
    ("qwen3_next", {"use_sliding_window": False}),
    ("qwen3_5_text", {"output_gate_type": "swish", "mlp_only_layers": []}),
    ("dots1", {"use_sliding_window": False, "sliding_window": None}),
    ("ernie4_5_moe", {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_gate_act": "softmax",
                      "moe_use_aux_free": True, "num_nextn_predict_layers": 1}),
    ("exaone_moe", {"num_nextn_predict_layers": 1, "first_last_k_dense_replace": 1}),
    ("exaone_moe", {"mlp_layer_types": None, "is_moe_layer": [False, True, True]}),
    ("exaone_moe", {"is_moe_layer": [True, False, True]}),
    ("falcon_h1", {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "time_step_rank": "auto",
                   "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3}),
    ("chatglm", {"num_hidden_layers": 2}),
    ("gemma2", {"sliding_window_size": 4096}),
    ("glm4_moe_lite", {"partial_rotary_factor": 1.0}),
    ("gpt_bigcode", {"pad_key_length": True}),
    ("hunyuan_v1_moe", {"use_mla": False, "num_media_embeds": 257, "vit_input_resolution": 224}),
    ("hy_v3", {"moe_intermediate_size": 40, "expert_hidden_dim": 40}),
    ("mellum", {"use_sliding_window": True, "max_window_layers": 0}),
    ("nemotron", {"rope_percent": 0.5}),
    ("nemotron_h", {"norm_eps": 1e-5, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
                    "time_step_rank": 256}),
    ("phi", {"rotary_dim": 8}),
    ("sarvam_mla", {"q_head_dim": 20, "head_dim": 32, "use_qk_norm": True, "output_dropout": 0.0}),
    ("sarvam_moe", {"score_function": "sigmoid", "use_bias": False, "max_window_layers": 19,
                    "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0}),
    ("afmoe", {"route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1,
               "num_expert_groups": 1, "num_limited_groups": 1, "load_balance_coeff": 1e-3,
               "use_grouped_mm": True}),
    ("exaone", {"embed_dropout": 0.0, "num_layers": 2, "layer_norm_epsilon": 1e-5}),
    ("mistral4", {"head_dim": 20, "qk_head_dim": 20}),
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    ("smollm3", {"max_window_layers": 28}),
    ("starcoder2", {"activation_function": "gelu", "attention_softmax_in_fp32": True,
                    "layer_norm_epsilon": 1e-5, "scale_attention_softmax_in_fp32": True}),
    *((name, AUTO_MAP) for name in ("ernie4_5", "internlm3", "nemotron_h", "phi3", "phimoe")),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"use_qk_norm": False}), ("qwen3_moe", {"qkv_bias": True}),
    ("qwen3_moe", {"shared_expert_intermediate_size": 512}),
    ("qwen3_next", {"use_sliding_window": True}),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}),
    ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}), ("ernie4_5_moe", {"moe_use_aux_free": False}),
    ("exaone_moe", {"mlp_layer_types": None, "is_moe_layer": [True]}),
    ("exaone_moe", {"mlp_layer_types": None, "is_moe_layer": [0, 1, 1]}),
    ("exaone_moe", {"is_moe_layer": [False, True, True]}),
    ("falcon_h1", {"mamba_use_mlp": False}),
    ("chatglm", {"num_hidden_layers": 3}),
    ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
    ("hunyuan_v1_moe", {"use_mla": True}),
    ("hy_v3", {"moe_intermediate_size": 40, "expert_hidden_dim": 24}),
    ("mellum", {"use_sliding_window": False}),
    ("nemotron", {"rope_percent": 1.0}),
    ("phi", {"rotary_dim": 4}),
    ("phi3", {"full_attn_mod": 2}), ("phi3", {"lm_head_bias": True}),
]  # fmt: skip


def read(name: str, change: dict[str, Any]) -> tuple[Any, list[str]]:
    """The sizes of a family's small config with a change, and what is said of its other keys."""
    return read_config(CASES[name].raw(**change))


@pytest.mark.parametrize(("name", "change"), IDLE)
def test_keys_that_change_nothing_are_not_named(name: str, change: dict[str, Any]) -> None:
    assert read(name, change)[1] == read(name, {})[1] == []


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_their_other_values_are_refused_by_name(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=[*change][-1]):
        read(name, change)


def test_marks_of_experts_choose_the_layers() -> None:
    change = {"mlp_layer_types": None, "is_moe_layer": [True, False, True]}
    config, _ = read("exaone_moe", change)
    assert config.dense_layers == {1}
    reference = ExaoneMoeReference(SOURCE, CASES["exaone_moe"].raw(**change))
    assert [i for i in range(config.layers) if reference.is_dense_layer(i)] == [1]


def test_a_window_beside_a_switch_that_denies_it_is_named() -> None:
    [warning] = read("dots1", {"use_sliding_window": False, "sliding_window": 20})[1]
    assert "use_sliding_window" in warning


@pytest.mark.parametrize(("outer", "named"), [(0.5, False), (0.25, True)])
def test_a_second_share_of_rotated_channels_is_named_if_it_differs(
    outer: float, named: bool
) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    change = {"rope_parameters": parameters, "partial_rotary_factor": outer}
    warnings = read("phi", change)[1]
    assert any("partial_rotary_factor" in each for each in warnings) == named


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"model_max_length": 4096}, 4096),  # Command R: 131072 beside 8192
        ({"model_max_length": 32}, 64),
        ({"model_max_length": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
    ],
)
def test_command_r_is_as_long_as_it_says(change: dict[str, Any], length: int) -> None:
    config, warnings = read("cohere", {"max_position_embeddings": 64, **change})
    assert config.max_len == length
    assert len(warnings) == ("rope_scaling" in change)

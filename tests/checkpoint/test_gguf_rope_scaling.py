from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.checkpoint.gguf_rope_scaling import (
    linear_or_yarn_rope_scaling,
    llama3_frequency_divisors,
    llama3_from_factors,
    rope_scaling_from_rope_freqs,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint


def hf_factors(theta: float, head_dim: int, scaling: dict) -> list[float]:
    """What transformers' own Llama 3 initialisation divides each frequency by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=theta,
        rope_scaling=dict(scaling),
    )
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {**scaling, "rope_theta": theta}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return (plain / scaled).tolist()


PUBLISHED = [
    (500000.0, 128, 8.0),  # Llama 3.1
    (500000.0, 64, 32.0),  # Llama 3.2 1B
]


@pytest.mark.parametrize(("theta", "head_dim", "factor"), PUBLISHED)
def test_published_scalings_are_recognised_from_their_divisors(theta, head_dim, factor):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert llama3_from_factors(hf_factors(theta, head_dim, scaling), theta, None) == scaling


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([2.0, 8.0, 16.0]),
    st.floats(1.0, 2.0),
    st.floats(3.0, 8.0),
    st.sampled_from([2048.0, 4096.0, 8192.0]),
)
def test_any_bands_give_a_scaling_with_the_same_frequencies(factor, low, high, context):
    expected = llama3_frequency_divisors(64, 500000.0, factor, (low, high, context))
    scaling = llama3_from_factors(expected, 500000.0, None)
    assert scaling is not None
    bands = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    assert llama3_frequency_divisors(64, 500000.0, scaling["factor"], bands) == pytest.approx(
        expected, rel=2e-3
    )


def test_divisors_of_one_scale_nothing_and_wild_ones_are_refused():
    assert llama3_from_factors([1.0] * 32, 10000.0, None) is None
    with pytest.raises(CheckpointError, match="rope_freqs"):
        llama3_from_factors([1.0, 5.0, 2.0, 8.0], 10000.0, None)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        llama3_from_factors([float("nan")] * 4, 10000.0, None)
    with pytest.raises(CheckpointError, match="no sense"):
        llama3_from_factors([1.0, 2.0, 4.0, 8.0], 1e-320, None)
    with pytest.raises(CorruptCheckpoint, match=r"scaling\.factor is 'x'"):
        linear_or_yarn_rope_scaling({"llama.rope.scaling.factor": "x"}, "llama")
    with pytest.raises(CorruptCheckpoint, match="is no text"):
        linear_or_yarn_rope_scaling(
            {"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.type": [1]}, "llama"
        )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_keys_become_a_dictionary(keys, expected):
    assert (
        linear_or_yarn_rope_scaling({f"qwen2.{key}": value for key, value in keys.items()}, "qwen2")
        == expected
    )


def test_scalings_without_an_implementation_are_refused():
    keys = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(CheckpointError, match="longrope"):
        linear_or_yarn_rope_scaling(keys, "llama")


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def scaled(**keys: object) -> dict:
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    "name", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"]
)
@pytest.mark.parametrize(
    "base", [{}, {"type": "linear", "factor": 2.0}, YARN], ids=["none", "linear", "yarn"]
)
def test_keys_that_change_the_rotation_and_are_not_computed_are_refused(base, name):
    """The names are those of gguf.constants.Keys.Rope; llama.cpp reads them whatever the type."""
    import gguf

    assert f"{{arch}}.rope.scaling.{name}" in vars(gguf.constants.Keys.Rope).values()
    wrong = 0.5
    with pytest.raises(
        CheckpointError, match=rf"rope\.scaling\.{name} is 0\.5, which modelmill does not compute"
    ):
        linear_or_yarn_rope_scaling(scaled(**base, **{name: wrong}), "llama")
    with pytest.raises(CheckpointError, match=name):
        rope_scaling_from_rope_freqs(scaled(**base, **{name: wrong}), "llama", [1.0] * 4, 10000.0)
    for nonsense in ("x", True, [1.0], float("nan"), float("inf")):
        with pytest.raises(CorruptCheckpoint, match="makes no sense"):
            linear_or_yarn_rope_scaling(scaled(**base, **{name: nonsense}), "llama")


@pytest.mark.parametrize(
    "base", [{}, {"type": "linear", "factor": 2.0}, YARN], ids=["none", "linear", "yarn"]
)
@pytest.mark.parametrize("unset", [False, True])
def test_the_same_keys_at_rest_change_nothing(base, unset):
    own = -1.0 if unset else float(base.get("type") == "yarn")
    idle = {
        "attn_factor": 1.0,
        "yarn_attn_factor": 1,
        "yarn_ext_factor": own,
        "yarn_log_multiplier": 0.0,
    }
    assert linear_or_yarn_rope_scaling(
        scaled(**base, **idle), "llama"
    ) == linear_or_yarn_rope_scaling(scaled(**base), "llama")


def test_yarn_without_its_extrapolation_is_no_yarn():
    with pytest.raises(CheckpointError, match="yarn_ext_factor is 0"):
        linear_or_yarn_rope_scaling(scaled(**YARN, yarn_ext_factor=0.0), "llama")

"""Gemma 4, text (``Gemma4ForCausalLM``): layers of two kinds that may share keys and values.

Layers with a window and layers with full attention have sizes and a rotation each. Every token has
an input of its own for each layer (E2B, E4B), or layers have experts beside the MLP (26B-A4B), or
neither (31B).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _gemma4_config, _llama_common, gemma2
from modelmill.models._gemma4_config import Gemma4Config
from modelmill.models._hf_config import (
    attention_bias_fields,
    num_layers,
    optional_positive_float,
    positive_int,
    read_activation,
    read_boolean,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder
from modelmill.nn.layer_spec import linear_tensor_names
from modelmill.nn.per_layer_input import PerLayerInputs
from modelmill.nn.scaled_sandwich import ScaledSandwichLayer
from modelmill.nn.step import Step

EXPERTS_PATH = "experts.moe.experts.*"
CHECKPOINT_LAYER_NAMES = {
    **CHECKPOINT_NAMES,
    **gemma2.GEMMA2_NORM_NAMES,
    "attn.q_proj": ("self_attn.q_proj",),
    "attn.rope.q_norm": ("self_attn.q_norm",),
    "layer_input.gate_proj": ("per_layer_input_gate",),
    "layer_input.up_proj": ("per_layer_projection",),
    "layer_input.post": ("post_per_layer_input_norm",),
    "experts.mlp_post": ("post_feedforward_layernorm_1",),
    "experts.norm": ("pre_feedforward_layernorm_2",),
    "experts.post": ("post_feedforward_layernorm_2",),
    "experts.moe.router": ("router.proj",),
    f"{EXPERTS_PATH}.gate_up_proj": ("experts.*.gate_proj", "experts.*.up_proj"),
    f"{EXPERTS_PATH}.down_proj": ("experts.*.down_proj",),
}
SCALE_SOURCES = {
    "output.scale": SourceTensors(("layer_scalar",)),
    "experts.router_norm.weight": SourceTensors(("router.scale",)),
    "experts.moe.routing.expert_scale": SourceTensors(("router.per_expert_scale",)),
}
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_LAYER_NAMES, tensors=SCALE_SOURCES)
PER_LAYER_INPUT_TENSOR_NAMES = {
    "table": "embed_tokens_per_layer",
    "projection": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
DEFAULT_MAX_POSITIONS = 131072
# of images alone: text is causal
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False, "vision"), "rope_scaling": ({},),
}  # fmt: skip
DEFAULT_SIZES = {
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> Gemma4Config:
    """Sizes from config.json; what it does not name is as in Gemma4TextConfig."""
    raw = with_config_defaults(raw, DEFAULT_SIZES)
    layers, hidden = num_layers(raw, "num_hidden_layers"), positive_int(raw, "hidden_size")
    windows = _gemma4_config.layer_windows(raw, layers)
    positions = positive_int(raw, "max_position_embeddings", default=DEFAULT_MAX_POSITIONS)
    # rotations are read by layer type below
    plain = with_config_overrides(
        raw, dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"))
    )
    act = read_activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    common = _llama_common.config_from_hf(
        plain,
        ConfigDefaults(positions=DEFAULT_MAX_POSITIONS, tied=True),
        activation=act,
        **attention_bias_fields(raw),
    )
    own = common.kv_heads, common.head_dim
    full_kv_heads, full_head_dim = _gemma4_config.read_global_kv_heads_and_head_dim(
        raw, windows, own
    )
    _gemma4_config.check_full_attention_heads(common.heads, full_kv_heads, full_head_dim, own[1])
    shared = {each.name: getattr(common, each.name) for each in fields(common)}
    rope = _gemma4_config.layer_type_rope(
        raw, _llama_common.FULL_ATTENTION, full_head_dim, positions
    )
    local_rope = None
    if any(windows):
        local_rope = _gemma4_config.layer_type_rope(
            raw, _llama_common.SLIDING_ATTENTION, own[1], positions
        )
    return Gemma4Config(**shared | {
        "max_len": positions, "rope": rope, "local_rope": local_rope, "windows": windows,
        "layer": ScaledSandwichLayer, "qk_norm": True, "attention_scale": 1.0,
        "embedding_scale": hidden**0.5,
        "logit_softcap": optional_positive_float(raw, "final_logit_softcapping"),
        "full_kv_heads": full_kv_heads, "full_head_dim": full_head_dim,
        "values_are_keys": read_boolean(raw, "attention_k_eq_v", False),
        "num_kv_shared_layers": _gemma4_config.num_kv_shared_layers(raw, windows),
        "double_wide": read_boolean(raw, "use_double_wide_mlp", False),
        "moe": _gemma4_config.expert_spec(raw, hidden, act),
        "inputs": _gemma4_config.per_layer_input_config(raw, layers, hidden, common.eps),
    })  # fmt: skip


def rename_rules(config: Gemma4Config) -> list[Rule]:
    """Every tensor of the model."""
    out = CHECKPOINT_LAYOUT.rename_rules(config)
    if config.inputs is not None:
        out += [
            Rule(f"layer_inputs.{name}.weight", (f"model.{source}.weight",))
            for name, source in PER_LAYER_INPUT_TENSOR_NAMES.items()
        ]
    keys = {
        f"layers.{layer}.attn.qkv_proj.{leaf}": layer
        for layer in range(config.first_kv_shared_layer)
        if config.windows[layer] is None and config.values_are_keys
        for leaf in linear_tensor_names(bias=True)
    }
    return [
        Rule(rule.target, rule.sources[:2], rule.how) if rule.target in keys else rule
        for rule in out
    ]


def ignored_tensors(config: Gemma4Config) -> tuple[str, ...]:
    """Unused tensors: buffers, a tied head's copy, keys and values of layers without their own."""
    layers = range(config.first_kv_shared_layer, config.layers)
    unused = (
        rf"model\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)"
        for layer in layers
    )
    return (*CHECKPOINT_LAYOUT.ignored_tensors(config), *unused)


class Model(Decoder):
    """The decoder with inputs of its layers."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.layer_inputs = None if config.inputs is None else PerLayerInputs(config.inputs)

    def attach_per_layer_inputs(self, x: torch.Tensor, step: Step) -> Step:
        """The step with what layers read beside the stream; x: the embeddings [T, H]."""
        if self.layer_inputs is None:
            return step
        return self.layer_inputs.attach_to_step(x, step)

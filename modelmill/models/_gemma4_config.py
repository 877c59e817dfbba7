"""Sizes and switches of Gemma 4's language model, which differ by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import (
    RawConfig,
    ReadTrackingConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    checked_rotary_channels,
    config_object,
    exact_quotient,
    positive_float,
    positive_int,
    read_boolean,
    rope_spec,
)
from modelmill.models._llama_common import FULL_ATTENTION, SLIDING_ATTENTION
from modelmill.models._moe_config import MAX_EXPERTS
from modelmill.nn.attention import AttentionSpec
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.layer_parts import LayerComponentSpecs
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import RouterConfig
from modelmill.nn.moe_branch import MoEBranchSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.per_layer_input import PerLayerInputConfig, PerLayerInputSpec
from modelmill.nn.rotary import RopeSpec
from modelmill.nn.shared_kv_attention import SharedKVAttentionSpec
from modelmill.nn.value_norm import ValueNormConfig

DEFAULT_ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10000.0},
    FULL_ATTENTION: {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
    },
}  # fmt: skip
"""``rope_parameters`` where config.json has none."""
PROPORTIONAL_ROPE_TYPE = "proportional"
LENGTH_INDEPENDENT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotations that need no length; those of Gemma 4 beside ``PROPORTIONAL_ROPE_TYPE``."""
PER_LAYER_CONFIG_KEYS = ("head_dim", "num_key_value_heads")
"""What ``per_layer_config`` may say of a layer."""


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """The decoder's sizes; ``kv_heads`` and ``head_dim`` are those of layers with a window.

    The experts of ``moe`` are beside the MLP of each layer, not in its place.

    Attributes:
        full_kv_heads: KV heads of layers with full attention.
        full_head_dim: Channels of a head there.
        values_are_keys: Whether the values are the projection of the keys there.
        num_kv_shared_layers: So many last layers attend to the keys and values of earlier ones: the
            last of their type that has some.
        double_wide: Whether their MLP is twice as wide.
        inputs: What layers read beside the stream, or None.
    """

    full_kv_heads: int = 1
    full_head_dim: int = 512
    values_are_keys: bool = False
    num_kv_shared_layers: int = 0
    double_wide: bool = False
    inputs: PerLayerInputConfig | None = None

    @property
    def first_kv_shared_layer(self) -> int:
        """The first layer without keys and values of its own."""
        return self.layers - self.num_kv_shared_layers

    @cached_property
    def last_kv_layer_by_windowed(self) -> dict[bool, int]:
        """By whether a layer has a window, the layer whose keys and values later ones read."""
        return {self.windows[i] is not None: i for i in range(self.first_kv_shared_layer)}

    def attention_spec(self, layer: int) -> AttentionSpec | SharedKVAttentionSpec:
        """The attention of layer ``layer``."""
        window = self.windows[layer]
        full = window is None
        spec = AttentionSpec(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.full_kv_heads if full else self.kv_heads,
            head_dim=self.full_head_dim if full else self.head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=True,
            eps=self.eps,
            window=window,
            scale=self.attention_scale,
            local_rope=not full,
            value_norm=ValueNormConfig(self.eps, from_keys=self.values_are_keys and full),
        )
        if layer < self.first_kv_shared_layer:
            return spec
        return SharedKVAttentionSpec(spec, self.last_kv_layer_by_windowed[not full])

    def mlp_spec(self, layer: int) -> MLPSpec:
        """The MLP of layer ``layer``."""
        wide = self.double_wide and layer >= self.first_kv_shared_layer
        inner = 2 * self.inner if wide else self.inner
        return MLPSpec(self.hidden, inner, activation=self.activation)

    def layer_parts(self, layer: int) -> LayerComponentSpecs:
        """The parts of layer ``layer``."""
        norm, inputs = self.norm_config, self.inputs
        return LayerComponentSpecs(
            self.attention_spec(layer),
            self.mlp_spec(layer),
            norm,
            experts=None if self.moe is None else MoEBranchSpec(self.moe, norm),
            layer_input=None
            if inputs is None
            else PerLayerInputSpec(layer, inputs.width, self.activation, norm),
        )


def layer_windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Per layer the window or None; the last layer has full attention whatever the list says."""
    plain = with_config_defaults(raw, {"sliding_window": 512})
    windows = _llama_common.windows_with_full_every_nth_layer(plain, layers, 6)
    if windows[-1] is not None and isinstance(raw, ReadTrackingConfig):
        raw.remarks.append(
            "config.json: the last layer has full attention, as in transformers, although "
            f"layer_types or the number of layers makes it {SLIDING_ATTENTION}"
        )
    return (*windows[:-1], None)


def read_global_kv_heads_and_head_dim(
    raw: RawConfig, windows: tuple[int | None, ...], own: tuple[int, int]
) -> tuple[int, int]:
    """KV heads and channels of a head in layers with full attention.

    Files have ``global_head_dim`` and ``num_global_key_value_heads``, or ``per_layer_config``.

    Args:
        raw: The config.
        windows: Of each layer.
        own: KV heads and channels of a head of layers with a window.

    Raises:
        CheckpointError: for layers of one type that differ.
    """
    kv_heads, head_dim = own
    overrides = raw.get("per_layer_config")
    dim = positive_int(raw, "global_head_dim", default=512)
    count = positive_int(raw, "num_global_key_value_heads", default=kv_heads)
    if overrides is None and read_boolean(raw, "attention_k_eq_v", False):
        return count, dim
    report_ineffective_keys(raw, "num_global_key_value_heads")  # as transformers does
    if overrides is None:
        return kv_heads, dim
    report_ineffective_keys(raw, "global_head_dim")
    sizes = [
        _layer_kv_heads_and_head_dim(
            overrides, layer, {"num_key_value_heads": kv_heads, "head_dim": head_dim}
        )
        for layer in range(len(windows))
    ]
    full = {size for size, window in zip(sizes, windows, strict=True) if window is None}
    slides = {size for size, window in zip(sizes, windows, strict=True) if window is not None}
    unknown = set(config_object("per_layer_config", overrides)) - set(map(str, range(len(windows))))
    if len(full) > 1 or slides - {own} or unknown:
        raise CheckpointError(
            "config.json: per_layer_config must give all layers with full attention the same "
            f"sizes, by number from 0 to {len(windows) - 1}, and no others; {quote(overrides, 60)} "
            "is not supported"
        )
    return full.pop()


def report_ineffective_keys(raw: RawConfig, *keys: str) -> None:
    """Have these keys named as being without effect, where the config has them."""
    if isinstance(raw, ReadTrackingConfig):
        raw.mark_unread({key: raw[key] for key in keys if raw.get(key) is not None})


def _layer_kv_heads_and_head_dim(
    overrides: Any, layer: int, own: Mapping[str, int]
) -> tuple[int, int]:
    """KV heads and channels of a head of one layer."""
    every = config_object("per_layer_config", overrides)
    sizes = config_object(f"per_layer_config.{layer}", every.get(str(layer)))
    unknown = sorted(set(sizes) - set(PER_LAYER_CONFIG_KEYS))
    if unknown:
        raise CheckpointError(
            f"config.json: per_layer_config.{layer}: {quote(unknown[0], 60)} is not computed "
            f"(known: {', '.join(PER_LAYER_CONFIG_KEYS)})"
        )
    merged = {**own, **sizes}
    return positive_int(merged, "num_key_value_heads"), positive_int(merged, "head_dim")


def check_full_attention_heads(
    heads: int, kv_heads: int, head_dim: int, window_head_dim: int
) -> None:
    """Raise CheckpointError for heads of layers with full attention that do not fit."""
    exact_quotient("num_attention_heads", heads, "num_global_key_value_heads", kv_heads)
    checked_rotary_channels("global_head_dim", head_dim, head_dim)
    if head_dim < window_head_dim:  # the rotation of both is padded to the windowed layers' heads
        raise CheckpointError(
            f"config.json: global_head_dim={head_dim} below head_dim={window_head_dim} is not "
            "computed"
        )


def layer_type_rope(
    raw: RawConfig,
    layer_type: str,
    head_dim: int,
    positions: int,
    *,
    default: Mapping[str, Any] = DEFAULT_ROPE_PARAMETERS,
) -> RopeSpec:
    """The rotation of the layers of one type.

    Args:
        raw: The config.
        layer_type: Whose rotation.
        head_dim: Channels of a head.
        positions: The longest sequence.
        default: ``rope_parameters`` of a config that has none.

    Raises:
        CheckpointError: for one that is not known or not computed.
    """
    every = config_object("rope_parameters", raw.get("rope_parameters")) or default
    unknown = sorted(every.keys() - {FULL_ATTENTION, SLIDING_ATTENTION})
    own = every.get(layer_type)
    if unknown or not isinstance(own, Mapping):
        raise CheckpointError(
            f"config.json: rope_parameters must have an object for {layer_type} (known: "
            f"{FULL_ATTENTION}, {SLIDING_ATTENTION}), not {quote(every, 60)}"
        )
    rope_type = own.get("rope_type", "default")
    if rope_type == PROPORTIONAL_ROPE_TYPE:
        return _proportional_rope(raw, layer_type, own, head_dim, positions)
    if rope_type not in LENGTH_INDEPENDENT_ROPE_TYPES:
        supported = ", ".join((PROPORTIONAL_ROPE_TYPE, *LENGTH_INDEPENDENT_ROPE_TYPES))
        raise CheckpointError(
            f"config.json: rope_parameters.{layer_type}: rope_type={quote(rope_type, 60)} is not "
            f"supported (supported: {supported})"
        )
    _llama_common.require_layer_rope_thetas(every)
    _llama_common.check_layer_rope_scaling(raw, layer_type, own)
    alone = {"rope_parameters": own, "rope_scaling": None, "rope_theta": None}
    return rope_spec(with_config_overrides(raw, alone), head_dim, positions)


def _proportional_rope(
    raw: RawConfig, layer_type: str, own: Mapping[str, Any], head_dim: int, positions: int
) -> RopeSpec:
    share = positive_float(own, "partial_rotary_factor", default=1.0)
    if share > 1:
        raise CheckpointError(
            f"config.json: rope_parameters.{layer_type}: partial_rotary_factor={share:g} is more "
            "than a head has; it must be at most 1"
        )
    factor = positive_float(own, "factor", default=1.0)
    scaling = {
        "rope_type": PROPORTIONAL_ROPE_TYPE,
        "partial_rotary_factor": share,
        "factor": factor,
    }
    if isinstance(raw, ReadTrackingConfig):
        read = {*scaling, "rope_theta"}
        name = f"rope_parameters.{layer_type}"
        raw.mark_unread({f"{name}.{key}": value for key, value in own.items() if key not in read})
    base = positive_float(own, "rope_theta")
    return RopeSpec(head_dim, base, positions, scaling)


def num_kv_shared_layers(raw: RawConfig, windows: tuple[int | None, ...]) -> int:
    """How many last layers have no keys and values of their own.

    Raises:
        CheckpointError: where a type of these layers has none in front of them.
    """
    value: Any = raw.get("num_kv_shared_layers")
    count = 0 if value is None else value
    if type(count) is not int or not 0 <= count < len(windows):
        raise CheckpointError(
            "config.json: num_kv_shared_layers must be an integer from 0 to "
            f"{len(windows) - 1}, not {quote(value, 60)}"
        )
    front = {window is None for window in windows[: len(windows) - count]}
    if count and front != {window is None for window in windows}:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers={count} leaves no layer of each of the layer_types "
            "in front of the shared ones; correct one of them"
        )
    return count


def expert_spec(raw: RawConfig, hidden: int, activation: str) -> MoESpec | None:
    """The experts beside the MLP; None without ``enable_moe_block``.

    Raises:
        CheckpointError: for sizes that are missing or do not fit.
    """
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not read_boolean(raw, "enable_moe_block", False):
        report_ineffective_keys(raw, *keys)
        return None
    count, chosen, inner = (positive_int(raw, key, max_value=MAX_EXPERTS * 64) for key in keys)
    if chosen > count or count > MAX_EXPERTS:
        raise CheckpointError(
            f"config.json: top_k_experts={chosen} and num_experts={count} do not fit: there are up "
            f"to {MAX_EXPERTS} experts, of which a token has at most all"
        )
    router = RouterConfig(count, chosen, logit_scale=hidden**-0.5, expert_scale=True)
    return MoESpec(router, MLPSpec(hidden, inner, activation=activation))


def per_layer_input_config(
    raw: RawConfig, layers: int, hidden: int, eps: float
) -> PerLayerInputConfig | None:
    """What layers read beside the stream; None for ``hidden_size_per_layer_input`` of 0.

    Raises:
        CheckpointError: for a table with fewer rows than there are tokens.
    """
    width: Any = raw.get("hidden_size_per_layer_input", 256)
    rows = positive_int(raw, "vocab_size_per_layer_input", default=262144)
    if type(width) is int and width == 0:
        return None
    width = positive_int(raw, "hidden_size_per_layer_input", default=256)
    vocab = positive_int(raw, "vocab_size", default=262144)
    if rows < vocab:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input={rows} is less than vocab_size={vocab}: "
            "every token needs a row"
        )
    return PerLayerInputConfig(rows, layers, width, hidden, eps)

"""SAM's sizes from a config.json or from the tensors of an original file.

Settings that are not computed are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, ReadTrackingConfig
from modelmill.models._hf_config import (
    MAX_LAYERS,
    check_vit_sizes,
    num_layers,
    positive_float,
    positive_int,
    require_supported_value,
)
from modelmill.models._sam_vit import SamVitSpec

EMBED_WIDTH = 256  # of the embeddings that encoder, prompts and decoder share
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "vision_config": {
        "hidden_act": ("gelu",), "num_channels": (3,), "qkv_bias": (True,), "use_abs_pos": (True,),
        "use_rel_pos": (True,), "output_channels": (EMBED_WIDTH,),
        "num_pos_feats": (EMBED_WIDTH // 2,),
    },
    "prompt_encoder_config": {
        "hidden_act": ("gelu",), "hidden_size": (EMBED_WIDTH,), "layer_norm_eps": (1e-6,),
        "mask_input_channels": (16,),
        "num_point_embeddings": (4,),
    },
    "mask_decoder_config": {
        "hidden_act": ("relu",), "hidden_size": (EMBED_WIDTH,), "mlp_dim": (2048,),
        "num_hidden_layers": (2,),
        "num_attention_heads": (8,), "attention_downsample_rate": (2,),
        "num_multimask_outputs": (3,),
        "iou_head_depth": (3,), "iou_head_hidden_dim": (256,), "layer_norm_eps": (1e-6, 1e-5),
    },
}  # fmt: skip
"""What transformers' config can change and is computed in one way only: what it may say, the
default first.

The decoder's epsilon is 1e-5, the original's; transformers' own default for the same weights is
1e-6."""


def spec_from_hf(raw: RawConfig) -> SamVitSpec:
    """The encoder's sizes from transformers' config.json. Raises CheckpointError."""
    if not isinstance(raw.get("vision_config"), Mapping):
        raise UnknownArchitecture(
            "config.json of a sam model lacks vision_config; give the original .pth instead"
        )
    tables = {part: _config_section_with_prefixed_keys(raw, part) for part in SUPPORTED_VALUES}
    for part, keys in SUPPORTED_VALUES.items():
        for key, allowed in keys.items():
            require_supported_value(tables[part], f"{part}.{key}", allowed, allowed[0])
    spec = _spec_from_vision_config(tables["vision_config"])
    for key, size in (
        ("image_size", spec.image),
        ("patch_size", spec.patch),
        ("image_embedding_size", spec.tokens_per_side),
    ):
        require_supported_value(
            tables["prompt_encoder_config"], f"prompt_encoder_config.{key}", (size,), size
        )
    return _check_sizes(spec)


def _config_section_with_prefixed_keys(raw: RawConfig, section: str) -> Mapping[str, Any]:
    """A part of transformers' config, each key with the part's name in front, as errors name it."""
    section_value = raw.get(section)
    if section_value is not None and not isinstance(section_value, Mapping):
        raise CheckpointError(
            f"config.json: {section} must be an object, not {quote(section_value, 60)}"
        )
    table = {f"{section}.{key}": value for key, value in (section_value or {}).items()}
    return raw.sub_view(table) if isinstance(raw, ReadTrackingConfig) else table


def _spec_from_vision_config(vision: Mapping[str, Any]) -> SamVitSpec:
    """The encoder's sizes from transformers' vision_config, with its defaults."""

    def size(key: str, default: int) -> int:
        return positive_int(vision, f"vision_config.{key}", default=default)

    width = size("hidden_size", 768)
    ratio = positive_float(vision, "vision_config.mlp_ratio", default=4.0)
    return SamVitSpec(
        width=width,
        depth=positive_int(
            vision, "vision_config.num_hidden_layers", default=12, max_value=MAX_LAYERS
        ),
        heads=size("num_attention_heads", 12),
        global_attn_indexes=_layer_indices(
            vision.get("vision_config.global_attn_indexes", (2, 5, 8, 11)), "global_attn_indexes"
        ),
        inner=size("mlp_dim", int(width * ratio)),
        image=size("image_size", 1024),
        patch=size("patch_size", 16),
        window=size("window_size", 14),
        eps=positive_float(vision, "vision_config.layer_norm_eps", default=1e-6),
    )


def spec_from_sizes_section(raw: RawConfig) -> SamVitSpec:
    """The encoder's sizes from the result of ``sam.config_from_shapes``."""
    sizes = _config_section_with_prefixed_keys(raw, "sizes")
    required = {
        key: positive_int(sizes, f"sizes.{key}")
        for key in ("width", "heads", "inner", "image", "patch", "window")
    }
    layers = _layer_indices(sizes.get("sizes.global_attn_indexes"), "sizes.global_attn_indexes")
    rows = positive_int(sizes, "sizes.rel_pos_rows") if "sizes.rel_pos_rows" in sizes else None
    return _check_sizes(
        SamVitSpec(
            depth=num_layers(sizes, "sizes.depth"),
            global_attn_indexes=layers,
            rel_pos_rows=rows,
            **required,
        )
    )


def _layer_indices(value: Any, key: str) -> tuple[int, ...]:
    """Check a key that lists layer indices; return them as a tuple."""
    if not isinstance(value, (list, tuple)) or any(type(n) is not int or n < 0 for n in value):
        raise CheckpointError(
            f"config.json: {key} must be a list of numbers of layers, not {quote(value, 60)}"
        )
    return tuple(value)


def _check_sizes(spec: SamVitSpec) -> SamVitSpec:
    """The same sizes. Raises CheckpointError where they do not fit each other."""
    check_vit_sizes(
        "image encoder", width=spec.width, heads=spec.heads, image=spec.image, patch=spec.patch
    )
    return spec

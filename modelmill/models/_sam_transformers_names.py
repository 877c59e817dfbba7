"""Transformers' names of SAM's modules (``SamModel``)."""

from __future__ import annotations

from modelmill.models._rename_rules import SourceTensors

ENCODER_LAYERS_PATH = "vision_encoder.layers"
BLOCK_NAMES = {"norm1": ("layer_norm1",), "norm2": ("layer_norm2",)}
"""Modules inside a block of the image encoder."""

_IMAGE_ENCODER_NAMES = {
    "image_encoder": "vision_encoder",
    "image_encoder.patch_embed.proj": "vision_encoder.patch_embed.projection",
    "image_encoder.neck.0": "vision_encoder.neck.conv1",
    "image_encoder.neck.1": "vision_encoder.neck.layer_norm1",
    "image_encoder.neck.2": "vision_encoder.neck.conv2",
    "image_encoder.neck.3": "vision_encoder.neck.layer_norm2",
}
_PROMPT_ENCODER_NAMES = {
    **{f"prompt_encoder.point_embeddings.{i}": f"prompt_encoder.point_embed.{i}" for i in range(4)},
    "prompt_encoder.mask_downscaling.0": "prompt_encoder.mask_embed.conv1",
    "prompt_encoder.mask_downscaling.1": "prompt_encoder.mask_embed.layer_norm1",
    "prompt_encoder.mask_downscaling.3": "prompt_encoder.mask_embed.conv2",
    "prompt_encoder.mask_downscaling.4": "prompt_encoder.mask_embed.layer_norm2",
    "prompt_encoder.mask_downscaling.6": "prompt_encoder.mask_embed.conv3",
}
_TRANSFORMER_PATH = "mask_decoder.transformer"
_DECODER_MLP_PATHS = (
    *(f"mask_decoder.output_hypernetworks_mlps.{i}" for i in range(4)),
    "mask_decoder.iou_prediction_head",
)
_MASK_DECODER_NAMES = {
    **{
        f"{_TRANSFORMER_PATH}.layers.{i}.norm{n}": f"{_TRANSFORMER_PATH}.layers.{i}.layer_norm{n}"
        for i in range(2)
        for n in (1, 2, 3, 4)
    },
    f"{_TRANSFORMER_PATH}.norm_final_attn": f"{_TRANSFORMER_PATH}.layer_norm_final_attn",
    "mask_decoder.output_upscaling.0": "mask_decoder.upscale_conv1",
    "mask_decoder.output_upscaling.1": "mask_decoder.upscale_layer_norm",
    "mask_decoder.output_upscaling.3": "mask_decoder.upscale_conv2",
    **{
        f"{path}.layers.{i}": f"{path}.{name}"
        for path in _DECODER_MLP_PATHS
        for i, name in enumerate(("proj_in", "layers.0", "proj_out"))
    },
}
TRANSFORMERS_NAMES = {
    path: (name,)
    for path, name in (_IMAGE_ENCODER_NAMES | _PROMPT_ENCODER_NAMES | _MASK_DECODER_NAMES).items()
}
"""Modules outside the blocks, by their paths in the model."""
TRANSFORMERS_SOURCES = {
    "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix": SourceTensors(
        ("shared_image_embedding.positional_embedding",)
    )
}
"""Tensors with names that do not follow from their module's."""

"""Segmentation models: configs that their files lack, and the needs of their engines.

A family may define ``ENGINE_TYPE``, ``FLOAT32_TENSORS`` and ``config_from_shapes(shapes)``
(core/model_family.py).
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, UsageError
from modelmill.core.model_family import family_options
from modelmill.core.registry import find_module, module_names
from modelmill.quant.vision_encoder import VISION_QUANTIZATIONS

LANGUAGE, SEGMENTATION = "language", "segmentation"


def with_config(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a config: its own, or one derived from the tensors' shapes.

    Raises:
        CheckpointError: if it has no config.json and no family recognizes its tensors.
    """
    if checkpoint.config:
        return checkpoint
    shapes = {name: checkpoint.info(name).shape for name in checkpoint.names()}
    for name in module_names("modelmill.models"):
        config_from_shapes = family_options(
            find_module("modelmill.models", name)
        ).config_from_shapes
        config = None if config_from_shapes is None else config_from_shapes(shapes)
        if config is not None:
            return replace(checkpoint, config=config)
    raise CheckpointError(
        f"{checkpoint.path.parent / 'config.json'}: is missing, and the tensors of "
        f"{checkpoint.path.name} are of no "
        "known model; put the checkpoint's config.json beside the weights"
    )


def engine_type_for(family: ModuleType) -> str:
    """Return the engine type of this family: "language" or "segmentation"."""
    return family_options(family).ENGINE_TYPE


def storage_dtype(family: ModuleType, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of the model is stored."""
    return torch.float32 if family_options(family).stays_float32(name) else dtype


def check_segmentation_options(config: BuildConfig, path: object) -> None:
    """Check that the options apply to a segmentation model.

    Raises:
        UsageError: if an option does not.
    """
    if config.quantization not in VISION_QUANTIZATIONS:
        raise UsageError(
            f"-q {config.quantization}: {path} segments images, and this recipe is for language "
            "models; "
            "take -q int8 (weights and activations) or -q fp8"
        )
    if config.quantization != "none" and config.activation_scales == "tensor":
        raise UsageError(
            f"--activation-scales tensor: {path} segments images, whose activations are scaled by "
            "token; leave it out"
        )
    if config.kv_cache_dtype != "auto":
        raise UsageError(
            f"--kv-cache-dtype: {path} segments images and has no KV cache; leave it out"
        )
    if config.tower != "none":
        raise UsageError(f"--tower: {path} segments images; its encoder's recipe is named by -q")
    if config.max_model_len is not None:
        raise UsageError(
            f"--max-model-len: {path} segments images and reads no tokens; leave it out"
        )


def segmentation_memory(
    model_config: Any, weight_bytes: int, device_memory: tuple[int, int], itemsize: int
) -> dict[str, Any]:
    """Return the memory of an image engine in bytes: weights and the widest layer of one image.

    There is no KV cache. device_memory: (total, free).
    """
    encoder = model_config.encoder
    tokens = encoder.grid**2
    if hasattr(encoder, "widths"):
        # the first stage has a quarter of the image's side and four times its channels, before and
        # after GELU
        workspace = 3 * (model_config.image // 4) ** 2 * 4 * encoder.widths[0] * itemsize
    else:
        # qkv or the MLP's hidden activations and, without our own kernel, the scores of one layer
        # over the whole image
        workspace = (
            3 * tokens * max(3 * encoder.width, encoder.inner) * itemsize
            + 2 * encoder.heads * tokens**2 * 4
        )
    needed = weight_bytes + workspace
    fits = f"one picture needs {needed / 2**20:.0f} MiB, weights included"
    verdict = (
        fits
        if needed <= device_memory[0] * 0.9
        else f"does not fit: {fits}, the device has {device_memory[0] / 2**20:.0f} MiB"
    )
    return {
        "device_total": device_memory[0],
        "device_free": device_memory[1],
        "weights": weight_bytes,
        "workspace": workspace,
        "fits": verdict,
    }

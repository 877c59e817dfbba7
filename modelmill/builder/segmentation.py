"""Segmentation models: the options that apply to them, and the memory of their engines."""

from __future__ import annotations

from typing import Any

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.quant.vision_encoder import SEGMENTATION_RECIPE_CHOICES


def check_segmentation_options(config: BuildConfig, path: object) -> None:
    """Check that the options apply to a segmentation model.

    Raises:
        UsageError: if an option does not.
    """
    if config.quantization not in SEGMENTATION_RECIPE_CHOICES:
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


def segmentation_memory_report(
    model_config: Any, weight_bytes: int, device_memory: tuple[int, int], itemsize: int
) -> dict[str, Any]:
    """Return the memory of an image engine in bytes: weights and the widest layer of one image.

    There is no KV cache. device_memory: (total, free).
    """
    encoder = model_config.encoder
    tokens = encoder.tokens_per_side**2
    if hasattr(encoder, "widths"):
        # the first stage has a quarter of the image's side and four times its channels, before and
        # after GELU
        workspace = 3 * (model_config.encoder.image // 4) ** 2 * 4 * encoder.widths[0] * itemsize
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

"""The model family of a checkpoint, and the resolution of options that are "auto"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from modelmill.builder.calibration_data import CalibrationSource
from modelmill.checkpoint.container import list_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, RequestError, UnknownArchitecture, UsageError
from modelmill.core.generation_defaults import read_generation
from modelmill.core.registry import closest_name, find_module, module_names
from modelmill.quant.recipe import Recipe


def find_family(checkpoint: Checkpoint) -> ModuleType:
    """Return the module models/<model_type>.py.

    Raises:
        UnknownArchitecture: with the unknown names and the nearest known family.
    """
    family = find_module("modelmill.models", checkpoint.model_type or "")
    if family is not None:
        return family
    known = module_names("modelmill.models")
    named = checkpoint.config.get("architectures")
    architectures = (
        list_names([str(n) for n in named])
        if isinstance(named, list) and named
        else "no architecture named"
    )
    near = closest_name(checkpoint.model_type or "", known)
    guess = f"; the nearest known family is {near}" if near else ""
    raise UnknownArchitecture(
        f"{checkpoint.path}: model_type {checkpoint.model_type!r} ({architectures}) is not "
        f"known{guess}; "
        f"known are {', '.join(known)}"
    )


def check_generation_config(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Check that requests can use the checkpoint's generation defaults.

    vocab_size: tokens of the model.

    Raises:
        CheckpointError: if a default is invalid.
    """
    try:
        defaults = read_generation(checkpoint.generation_config, checkpoint.container)
        outside = next((id for id in defaults.processors.token_ids() if id >= vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"its token ids must be between 0 and {vocab_size - 1}, not {outside}"
            )
    except RequestError as error:
        raise CheckpointError(
            f"{checkpoint.path}: generation_config.json: {error}; correct it there"
        ) from None


def resolve_options(
    checkpoint: Checkpoint,
    config: BuildConfig,
    recipe: Recipe | None,
    source: CalibrationSource | None,
) -> tuple[BuildConfig, dict[str, str]]:
    """Return the options with no "auto" left, and the reason for each value.

    ``-q auto`` and ``keep`` are resolved before (auto_precision, keep_quantized). source: the
    calibration source.

    Raises:
        UsageError: if a file is missing.
    """
    reasons = {}
    target, dtype = config.target, config.dtype
    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "cpu"
        reasons["target"] = f"{target}: what is here"
    stored = str(checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "")
    if dtype == "auto":
        if target == "cpu":
            dtype, reasons["dtype"] = (
                "float32",
                "float32: exact, and no slower than 16 bit without special instructions",
            )
        elif stored in ("float16", "bfloat16"):
            dtype, reasons["dtype"] = stored, f"{stored}: as stored"
        else:
            dtype, reasons["dtype"] = (
                "bfloat16",
                "bfloat16: half the traffic of float32, no overflow",
            )
    method = "nearest" if recipe is None else recipe.method
    if config.method == "auto" and method != "nearest":
        reasons["method"] = f"{method}: the best measured"
    if recipe is not None:
        changes, why = recipe.resolve_options(config)
        config, reasons = replace(config, **changes), reasons | why
    if source is not None:
        calibration = f"sha256:{source.digest}" + (
            f"+{source.image_digest}" if source.image_digest else ""
        )
        reasons["calibration"] = (
            f"{source.to_json()['name']}, up to {source.num_samples} × {source.max_length} tokens"
        )
    else:
        # its path must not make two engines of one checkpoint differ
        if config.calibration is not None and not Path(config.calibration).is_file():
            raise UsageError(f"--calibration {config.calibration}: there is no such file")
        calibration = None
        if config.calibration is not None:
            reasons["calibration"] = (
                f"not used: the recipe {config.quantization} needs no statistics"
            )
    return replace(
        config, target=target, dtype=dtype, method=method, calibration=calibration
    ), reasons

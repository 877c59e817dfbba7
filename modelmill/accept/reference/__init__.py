"""The independent reference of the acceptance contract: dense float32, one layer in memory.

It uses the checkpoint's own names. Nothing is shared with the engine's models, nn, ops, weights or
rename rules, so that an error there is not repeated here. A family is a file of this folder with a
REFERENCE. MODEL_TYPES: those that it is of, if not only of the file's name. NAME_PREFIX: what the
names of its tensors begin with, if not with "model.".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from modelmill.accept.reference import (
    decoder,
    gguf_apertus,
    gguf_biased_experts,
    gguf_delta_net,
    gguf_dense_families,
    gguf_gemma4,
    gguf_granite_swa,
    gguf_hunyuan,
    gguf_lfm2,
    gguf_mamba2,
    gguf_mellum,
    gguf_nemotron_h,
)
from modelmill.accept.reference.base import (
    ExtraModuleTrace,
    HeadTrace,
    LayerTrace,
    LayerWeights,
    ModuleIO,
    ModuleWeights,
    ReferenceModel,
)
from modelmill.accept.reference.dequantize import DequantizedContainer
from modelmill.accept.reference.gguf_config import config_from_gguf, reference_rope_from_gguf
from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import OpenedCheckpoint, RawContainer, TensorSource
from modelmill.core.errors import CorruptCheckpoint, ModelmillError, UnknownArchitecture
from modelmill.core.module_lookup import import_module_if_exists, list_module_names

__all__ = [
    "ModuleWeights",
    "RawContainer",
    "HeadTrace",
    "LayerTrace",
    "LayerWeights",
    "ModuleIO",
    "OpenedCheckpoint",
    "ExtraModuleTrace",
    "ReferenceModel",
    "open_reference",
]


GGUF_CONFIG_READERS_AND_SOURCES = {
    architecture: reader
    for module in (
        gguf_apertus, gguf_biased_experts, gguf_delta_net, gguf_dense_families, gguf_granite_swa,
        gguf_hunyuan, gguf_lfm2, gguf_mamba2, gguf_mellum, gguf_nemotron_h,
    )
    for architecture, reader in module.CONFIG_READERS_AND_SOURCES.items()
}  # fmt: skip
"""GGUF's architecture → what reads its config, and its tensors."""
ROPE_FREQS_TENSOR_NAME = "rope_freqs.weight"
NULL_AS_ABSENT_KEYS = re.compile(
    r".*_(eps|epsilon|multiplier)|logits_scaling|window_size|mamba_expand"
)


def open_reference(
    checkpoint: OpenedCheckpoint,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> ReferenceModel:
    """Return the reference of an opened checkpoint, in float32 or float64.

    It reads the checkpoint's ``raw`` container and ``config``.

    device: where it computes, with the same plain operations everywhere (see
    ``accept.reference_device``).

    Raises:
        UnknownArchitecture: if no reference supports this family.
        TensorMismatch: if a tensor is missing.
        CorruptCheckpoint: if a GGUF's metadata has values of another type.
    """
    container: RawContainer = checkpoint.raw_container
    if "general.architecture" in container.metadata and "token_embd.weight" in container.names():
        return _open_gguf_reference(container, dtype, device)
    config = _drop_null_config_factors(checkpoint.config)
    if config.get("quantization_config"):
        container = DequantizedContainer(container, config)
    family = _find_family_module(config)
    prefix = getattr(family, "NAME_PREFIX", "model.")
    source = TensorSource(container, dtype, prefix, device=device)
    reference: ReferenceModel = family.REFERENCE(source, config)
    return reference


def _drop_null_config_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out factors and the like that are null, which have their families' defaults."""
    return {
        key: value
        for key, value in config.items()
        if value is not None or not NULL_AS_ABSENT_KEYS.fullmatch(key)
    }


def _open_gguf_reference(
    container: RawContainer, dtype: torch.dtype, device: str | torch.device
) -> ReferenceModel:
    if container.metadata["general.architecture"] == gguf_gemma4.ARCHITECTURE:
        return _open_gemma4_gguf_reference(container, dtype, device)
    architecture = container.metadata["general.architecture"]
    if architecture in GGUF_CONFIG_READERS_AND_SOURCES:
        read_config, source_class = GGUF_CONFIG_READERS_AND_SOURCES[architecture]
        config = _read_gguf_config(read_config, container)
        tensors = source_class(container, dtype, config, device=device)
        model: Any = _find_family_module(config).REFERENCE(tensors, config)
        if ROPE_FREQS_TENSOR_NAME in container.names():
            divisors = tensors.read_uncast_tensor(ROPE_FREQS_TENSOR_NAME)
            model.set_rope(_divide_rope_frequencies(model.rope, divisors))
        return cast(ReferenceModel, model)
    config = _read_gguf_config(config_from_gguf, container)
    family = _find_family_module(config)
    source = GgufSource(container, dtype, config, device=device)
    if family is not decoder:
        reference: Any = family.REFERENCE(source, config)
        if "architecture" in config:  # with experts; the rotation's scaling has keys of GGUF
            own_keys = config | {"model_type": config["architecture"]}
            reference.set_rope(reference_rope_from_gguf(container, own_keys))
        return reference
    if ROPE_FREQS_TENSOR_NAME in container.names():
        source.read_uncast_tensor(ROPE_FREQS_TENSOR_NAME)  # rotary frequencies are computed from it
    if container.metadata["general.architecture"] != config["model_type"]:
        return decoder.DecoderReference(source, config)
    return decoder.DecoderReference(source, config, reference_rope_from_gguf(container, config))


def _read_gguf_config(
    read: Callable[[RawContainer], dict[str, Any]], container: RawContainer
) -> dict[str, Any]:
    """Return the config that ``read`` makes of a GGUF's metadata.

    Raises:
        CorruptCheckpoint: for values of a type or size that no architecture has.
    """
    try:
        return read(container)
    except ModelmillError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise CorruptCheckpoint(
            "acceptance cannot read the GGUF's metadata "
            f"({' '.join(str(error).split())[:80]}); convert the model again"
        ) from None


def _divide_rope_frequencies(rope: ReferenceRope, divisors: torch.Tensor) -> ReferenceRope:
    """Return the rotation with each of its frequencies divided by a number of the file."""
    return replace(rope, rope_type="factors", factors=divisors.float())


def _open_gemma4_gguf_reference(
    container: RawContainer, dtype: torch.dtype, device: str | torch.device
) -> ReferenceModel:
    config = gguf_gemma4.gemma4_config(container)
    source = gguf_gemma4.Gemma4GgufSource(container, dtype, config, device=device)
    source.read_uncast_tensor(gguf_gemma4.ROPE_FREQS_TENSOR)  # the config was made from it
    reference: ReferenceModel = _find_family_module(config).REFERENCE(source, config)
    return reference


def _find_family_module(config: Mapping[str, Any]) -> Any:
    """Return the file of this folder whose MODEL_TYPES has the config's model_type."""
    model_type, known = config.get("model_type"), []
    for name in list_module_names(__name__):
        family = import_module_if_exists(__name__, name)
        if not hasattr(family, "REFERENCE"):
            continue
        model_types = vars(family).get("MODEL_TYPES", (name,))
        if model_type in model_types:
            return family
        known += model_types
    raise UnknownArchitecture(
        f"no reference supports model_type {model_type!r}; known are {', '.join(sorted(known))}"
    )

"""BLIP-2 checkpoints of transformers, presented as MiniGPT-4's published parts.

Both compute the same; the names are mapped to those of the original files (``minigpt4_parts``), so
that one model and one reference serve both. Two things differ: the norm between vision encoder and
Q-Former has the encoder's eps, and the encoder's keys may have a bias, which changes nothing (it
adds the same number to every score of a query) and is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, no_such_tensor_error
from modelmill.checkpoint.minigpt4_parts import LANGUAGE_PREFIX, MODEL_TYPE, VISION_ENCODER_PREFIX
from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import ReadTrackingConfig

BLIP2_TYPE = "blip-2"
INSTRUCTBLIP_TYPES = ("instructblip", "instructblipvideo")
_MINIGPT4_TENSOR_BY_BLIP2 = {
    "vision_model.embeddings.class_embedding": VISION_ENCODER_PREFIX + "cls_token",
    "vision_model.embeddings.position_embedding": VISION_ENCODER_PREFIX + "pos_embed",
}
_MINIGPT4_MODULE_BY_BLIP2 = {
    "vision_model.embeddings.patch_embedding": VISION_ENCODER_PREFIX + "patch_embed.proj",
    "vision_model.post_layernorm": "ln_vision",
    "qformer.layernorm": "Qformer.bert.embeddings.LayerNorm",
    "language_projection": "llama_proj",
}
_MINIGPT4_LAYER_PREFIX_BY_BLIP2 = {
    "vision_model.encoder.layers.": VISION_ENCODER_PREFIX + "blocks.",
    "qformer.encoder.layer.": "Qformer.bert.encoder.layer.",
}
_MINIGPT4_LAYER_MODULE_BY_BLIP2 = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    **{
        f"{attention}.attention.{name}": f"{attention}.self.{name}"
        for attention in ("attention", "crossattention")
        for name in ("query", "key", "value")
    },
}
"""Modules of the vision encoder's and the Q-Former's layers; others have the same names."""
_QKV_BIAS_PATTERN = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.self_attn\.qkv\.bias")


class Blip2AsMiniGpt4Container:
    """The tensors under the names of MiniGPT-4's files; other names are not changed."""

    def __init__(self, container: Container) -> None:
        self._container = container
        # our name → file name, and the third of it; None: all
        self._sources: dict[str, tuple[str, int | None]] = {}
        for name in container.names():
            bias = _QKV_BIAS_PATTERN.fullmatch(name)
            if bias is not None:
                self._sources[f"{VISION_ENCODER_PREFIX}blocks.{bias[1]}.attn.q_bias"] = (name, 0)
                self._sources[f"{VISION_ENCODER_PREFIX}blocks.{bias[1]}.attn.v_bias"] = (name, 2)
            else:
                self._sources[_to_minigpt4_name(name)] = (name, None)
        self.metadata: dict[str, Any] = container.metadata

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._sources)

    @property
    def num_vision_blocks(self) -> int:
        """Return the number of blocks of the vision encoder."""
        blocks = f"{VISION_ENCODER_PREFIX}blocks."
        norms = [name for name in self._sources if name.endswith(".norm1.weight")]
        return sum(name.startswith(blocks) for name in norms)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        file_name, third = self._locate_tensor(name)
        info = self._container.tensor_info(file_name)
        if third is None:
            return TensorInfo(name, info.shape, info.dtype, info.nbytes)
        return TensorInfo(name, (info.shape[0] // 3,), info.dtype, info.nbytes // 3)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        file_name, third = self._locate_tensor(name)
        tensor = self._container.get(file_name)
        return tensor if third is None else tensor.chunk(3)[third]

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return self._container.files()

    def _locate_tensor(self, name: str) -> tuple[str, int | None]:
        if name not in self._sources:
            raise no_such_tensor_error(self.files()[0], name)
        return self._sources[name]


class PrefixStrippedView:
    """The tensors of a container whose names begin with ``prefix``, without it."""

    def __init__(self, container: Container, prefix: str) -> None:
        self._container, self._prefix = container, prefix
        self.metadata: dict[str, Any] = container.metadata

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [
            n.removeprefix(self._prefix)
            for n in self._container.names()
            if n.startswith(self._prefix)
        ]

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        info = self._container.tensor_info(self._prefix + name)
        return TensorInfo(name, info.shape, info.dtype, info.nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        return self._container.get(self._prefix + name)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return self._container.files()


def convert_blip2_config(
    raw: Mapping[str, Any], path: Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Convert transformers' Blip2Config.

    Returns:
        The config of the whole as MiniGPT-4's, the config of its language model, and unused keys.

    Raises:
        CheckpointError: if parts are missing or not integers.
        UnknownArchitecture: if it is not a BLIP-2.
    """
    config = ReadTrackingConfig(raw)
    if config.get("model_type") in INSTRUCTBLIP_TYPES:
        raise UnknownArchitecture(
            f"{path}: is InstructBLIP, whose Q-Former reads the question too; BLIP-2 and "
            "MiniGPT-4 are supported"
        )
    vision, asking = (
        config.sub_view(_sub_config(config, key, path), f"{key}.")
        for key in ("vision_config", "qformer_config")
    )
    text = _sub_config(config, "text_config", path)
    if not isinstance(text.get("model_type"), str):
        raise CheckpointError(f"{path}: config.json: text_config names no model_type")
    for name, part in (("vision_config", vision), ("qformer_config", asking)):
        if part.get("hidden_act", "gelu") != "gelu":
            raise UnknownArchitecture(
                f"{path}: config.json: {name} has hidden_act {quote(part['hidden_act'], 40)}; "
                "only gelu is known"
            )
    if vision.get("qkv_bias", True) is not True or asking.get("use_qformer_text_input"):
        raise UnknownArchitecture(
            f"{path}: is a variant of BLIP-2 (qkv_bias, use_qformer_text_input) not known here"
        )
    vision_encoder = {
        "width": vision.get("hidden_size", 1408),
        "depth": vision.get("num_hidden_layers", 39),
        "heads": vision.get("num_attention_heads", 16),
        "inner": vision.get("intermediate_size", 6144),
        "image": vision.get("image_size", 224),
        "patch": vision.get("patch_size", 14),
    }
    qformer = {
        "width": asking.get("hidden_size", 768),
        "depth": asking.get("num_hidden_layers", 12),
        "heads": asking.get("num_attention_heads", 12),
        "inner": asking.get("intermediate_size", 3072),
        "image_width": asking.get("encoder_hidden_size", 1408),
        "cross_attention_frequency": asking.get("cross_attention_frequency", 2),
        "queries": config.get("num_query_tokens", 32),
    }
    eps = vision.get("layer_norm_eps", 1e-6)
    norms = {"vision_encoder": eps, "between": eps, "qformer": asking.get("layer_norm_eps", 1e-12)}
    embedder = {
        "vision_encoder": vision_encoder,
        "qformer": qformer,
        "eps": norms,
        "language": text["model_type"],
    }
    stored = {key: config[key] for key in ("torch_dtype", "dtype") if config.get(key) is not None}
    return (
        {**text, **stored, "model_type": MODEL_TYPE, "image_embedder": embedder},
        {**text, **stored},
        config.unread(),
    )


def encode_chat_format_file(num_query_tokens: int) -> bytes:
    """Return the chat format of its questions, as a file of the tokenizer's folder."""
    return (
        json.dumps({"format": BLIP2_TYPE, "tokens": num_query_tokens}, indent=1, sort_keys=True)
        + "\n"
    ).encode()


def _sub_config(config: ReadTrackingConfig, key: str, path: Path) -> Mapping[str, Any]:
    section = config.get(key)
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{path}: config.json of a BLIP-2 lacks {key}, the sizes of one of its parts"
        )
    return section


def _to_minigpt4_name(name: str) -> str:
    if name in _MINIGPT4_TENSOR_BY_BLIP2:
        return _MINIGPT4_TENSOR_BY_BLIP2[name]
    if name.startswith("language_model."):
        return LANGUAGE_PREFIX + name.removeprefix("language_model.")
    for stack, stack_name in _MINIGPT4_LAYER_PREFIX_BY_BLIP2.items():
        if name.startswith(stack):
            number, _, tensor = name.removeprefix(stack).partition(".")
            module, _, leaf = tensor.rpartition(".")
            return (
                f"{stack_name}{number}.{_MINIGPT4_LAYER_MODULE_BY_BLIP2.get(module, module)}.{leaf}"
            )
    module, _, leaf = name.rpartition(".")
    return (
        f"{_MINIGPT4_MODULE_BY_BLIP2[module]}.{leaf}"
        if module in _MINIGPT4_MODULE_BY_BLIP2
        else name
    )

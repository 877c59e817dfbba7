"""BLIP-2 as transformers keeps it, in one checkpoint, seen as MiniGPT-4's published parts are: their arithmetic is one.

The names are turned into those of the original files (``joined``), so that one model and one reference serve both. Two
things differ: the norm between tower and Q-Former has the tower's eps, and the tower's keys may have a bias, which
changes nothing (a query meets the same number with every key) and is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, no_such_tensor
from modelmill.checkpoint.joined import EYES, LANGUAGE, MODEL_TYPE
from modelmill.core.config_view import ConfigView
from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.quote import quoted

TYPE = "blip-2"
INSTRUCTED = ("instructblip", "instructblipvideo")
THEIRS = "language_model."
_NAMES = (
    (r"vision_model\.embeddings\.class_embedding", EYES + "cls_token"),
    (r"vision_model\.embeddings\.position_embedding", EYES + "pos_embed"),
    (r"vision_model\.embeddings\.patch_embedding\.(\w+)", EYES + r"patch_embed.proj.\1"),
    (r"vision_model\.encoder\.layers\.(\d+)\.layer_norm([12])\.(\w+)", EYES + r"blocks.\1.norm\2.\3"),
    (r"vision_model\.encoder\.layers\.(\d+)\.self_attn\.projection\.(\w+)", EYES + r"blocks.\1.attn.proj.\2"),
    (r"vision_model\.encoder\.layers\.(\d+)\.self_attn\.qkv\.weight", EYES + r"blocks.\1.attn.qkv.weight"),
    (r"vision_model\.encoder\.layers\.(\d+)\.mlp\.(fc[12]\.\w+)", EYES + r"blocks.\1.mlp.\2"),
    (r"vision_model\.post_layernorm\.(\w+)", r"ln_vision.\1"),
    (r"qformer\.layernorm\.(\w+)", r"Qformer.bert.embeddings.LayerNorm.\1"),
    (r"qformer\.(encoder\.layer\.\d+\.(?:cross)?attention)\.attention\.(.+)", r"Qformer.bert.\1.self.\2"),
    (r"qformer\.(encoder\..+)", r"Qformer.bert.\1"),
    (r"language_projection\.(\w+)", r"llama_proj.\1"),
    (r"language_model\.(.+)", LANGUAGE + r"\1"),
)  # fmt: skip
_BLOCK = re.escape(EYES) + r"blocks\.\d+\.norm1\.weight"
_BIAS = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.self_attn\.qkv\.bias")


class Parts:
    """The tensors under the names of MiniGPT-4's files; names that are in neither stay as they are."""

    def __init__(self, container: Container) -> None:
        self._container = container
        # our name → theirs, and which third of it; None: all
        self._known: dict[str, tuple[str, int | None]] = {}
        for name in container.names():
            bias = _BIAS.fullmatch(name)
            if bias is not None:
                self._known[f"{EYES}blocks.{bias[1]}.attn.q_bias"] = (name, 0)
                self._known[f"{EYES}blocks.{bias[1]}.attn.v_bias"] = (name, 2)
            else:
                self._known[_spelled(name)] = (name, None)
        self.metadata: dict[str, Any] = container.metadata

    def names(self) -> list[str]:
        return list(self._known)

    @property
    def blocks(self) -> int:
        """Blocks of the tower."""
        return len({name for name in self._known if re.fullmatch(_BLOCK, name)})

    def info(self, name: str) -> TensorInfo:
        theirs, third = self._where(name)
        info = self._container.info(theirs)
        if third is None:
            return TensorInfo(name, info.shape, info.dtype, info.nbytes)
        return TensorInfo(name, (info.shape[0] // 3,), info.dtype, info.nbytes // 3)

    def get(self, name: str) -> torch.Tensor:
        theirs, third = self._where(name)
        tensor = self._container.get(theirs)
        return tensor if third is None else tensor.chunk(3)[third]

    def files(self) -> list[Path]:
        return self._container.files()

    def _where(self, name: str) -> tuple[str, int | None]:
        if name not in self._known:
            raise no_such_tensor(self.files()[0], name)
        return self._known[name]


class Behind:
    """The tensors of a container whose names begin with ``prefix``, without it."""

    def __init__(self, container: Container, prefix: str) -> None:
        self._container, self._prefix = container, prefix
        self.metadata: dict[str, Any] = container.metadata

    def names(self) -> list[str]:
        return [n.removeprefix(self._prefix) for n in self._container.names() if n.startswith(self._prefix)]

    def info(self, name: str) -> TensorInfo:
        info = self._container.info(self._prefix + name)
        return TensorInfo(name, info.shape, info.dtype, info.nbytes)

    def get(self, name: str) -> torch.Tensor:
        return self._container.get(self._prefix + name)

    def files(self) -> list[Path]:
        return self._container.files()


def configs_of(raw: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(config of the whole as MiniGPT-4's are, config of its language model, keys that neither was made from).

    raw: transformers' Blip2Config. Raises CheckpointError where parts are missing or no whole numbers,
    UnknownArchitecture for what is no such model.
    """
    config = ConfigView(raw)
    if config.get("model_type") in INSTRUCTED:
        raise UnknownArchitecture(
            f"{path}: is InstructBLIP, whose Q-Former reads the question too; BLIP-2 and MiniGPT-4 are known here"
        )
    vision, asking = (config.part(_table(config, key, path), f"{key}.") for key in ("vision_config", "qformer_config"))
    text = _table(config, "text_config", path)
    if not isinstance(text.get("model_type"), str):
        raise CheckpointError(f"{path}: config.json: text_config names no model_type")
    for name, part in (("vision_config", vision), ("qformer_config", asking)):
        if part.get("hidden_act", "gelu") != "gelu":
            raise UnknownArchitecture(
                f"{path}: config.json: {name} has hidden_act {quoted(part['hidden_act'], 40)}; only gelu is known"
            )
    if vision.get("qkv_bias", True) is not True or asking.get("use_qformer_text_input"):
        raise UnknownArchitecture(f"{path}: is a variant of BLIP-2 (qkv_bias, use_qformer_text_input) not known here")
    tower = {
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
        "seen": asking.get("encoder_hidden_size", 1408),
        "every": asking.get("cross_attention_frequency", 2),
        "queries": config.get("num_query_tokens", 32),
    }
    eps = vision.get("layer_norm_eps", 1e-6)
    norms = {"tower": eps, "between": eps, "qformer": asking.get("layer_norm_eps", 1e-12)}
    reader = {"tower": tower, "qformer": qformer, "eps": norms, "language": text["model_type"]}
    stored = {key: config[key] for key in ("torch_dtype", "dtype") if config.get(key) is not None}
    return {**text, **stored, "model_type": MODEL_TYPE, "reader": reader}, {**text, **stored}, config.unread()


def chat_file(queries: int) -> bytes:
    """What the format of its questions is, as a file of the tokenizer's folder."""
    return (json.dumps({"format": TYPE, "tokens": queries}, indent=1, sort_keys=True) + "\n").encode()


def _table(config: ConfigView, key: str, path: Path) -> Mapping[str, Any]:
    found = config.get(key)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: config.json of a BLIP-2 lacks {key}, the sizes of one of its parts")
    return found


def _spelled(name: str) -> str:
    for pattern, ours in _NAMES:
        found = re.fullmatch(pattern, name)
        if found is not None:
            return found.expand(ours)
    return name

"""The text half of a vision-language checkpoint, as a checkpoint of the language model alone.

Files of Qwen3.5, Gemma 3, Gemma 4 and Mistral 3 hold a language model beside a vision encoder.
What belongs to images or sound is left out, and the names of the rest are made those of the text
class. Experts that are stacked in one tensor are presented one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, no_such_tensor_error
from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote

TEXT_TYPE_BY_VLM_TYPE = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",  # without inputs of layers and experts
}
"""Types of vision-language checkpoints → those of their language models."""
TEXT_MODEL_TYPE_CHOICES = {"mistral3": ("mistral", "ministral3", "mistral4")}
"""Those whose ``text_config`` says which of several its language model is; the first by default."""
STACKED_TEXT_TYPES = ("mistral4",)
"""Those of them whose experts are stacked, also in checkpoints without images."""

# sizes that published files leave to the configuration class
TEXT_CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"vocab_size": 262208, "num_attention_heads": 8},
    "gemma4_unified": {
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    },
}
NON_TEXT_PREFIXES = (
    "model.visual.",
    *(
        f"{stem}{part}."
        for stem in ("", "model.")
        for part in (
            "vision_tower",
            "vision_embedder",
            "multi_modal_projector",
            "embed_vision",
            "audio_tower",
            "embed_audio",
        )
    ),
)
NON_TEXT_CONFIG_KEYS = ("vision_config", "audio_config")
"""What a config has of images and sound."""
TEXT_PREFIX_BY_VLM_PREFIX = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the language model's tensors → those of the text class."""
STACKED_EXPERT_SUFFIXES = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class _TensorSource:
    """A tensor of the files, or of a stacked one (expert, part of its rows, of how many parts)."""

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


def split_language_model_config(
    config: Mapping[str, Any], file: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of the language model, and what it leaves out, for a warning.

    Raises:
        CheckpointError: for a config without ``text_config``.
    """
    whole_type = str(config.get("model_type"))
    if whole_type not in (*TEXT_TYPE_BY_VLM_TYPE, *TEXT_MODEL_TYPE_CHOICES):
        return dict(config), {}
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"{file}: text_config must be an object with the language model's sizes, not "
            f"{quote(text, 60)}"
        )
    text_type = _language_model_type(whole_type, text, file)
    ties = [each.get("tie_word_embeddings") for each in (config, text)]
    tied = next((each for each in ties if each is not None), None)
    if {True, False} <= {each for each in ties if isinstance(each, bool)}:
        # transformers 4 obeyed the inner one, 5 obeys the outer one, and both save such configs
        # where one is a default. The tensors are certain: tied, unless there is a head that differs
        # from the embedding (builder/model_config.py).
        tied = True
    copied = ("torch_dtype", "dtype", "quantization_config", "architectures")
    outer = {key: config[key] for key in copied if config.get(key) is not None}
    if tied is not None:
        outer["tie_word_embeddings"] = tied
    left_out = {key: config[key] for key in NON_TEXT_CONFIG_KEYS if config.get(key)}
    missing = {
        key: value
        for key, value in TEXT_CONFIG_DEFAULTS.get(whole_type, {}).items()
        if text.get(key) is None
    }
    return {**text, **missing, **outer, "model_type": text_type}, left_out


def _language_model_type(whole_type: str, text: Mapping[str, Any], file: Path) -> str:
    """The type of a checkpoint's language model.

    Raises:
        CheckpointError: for a language model that such a checkpoint has not.
    """
    known = TEXT_MODEL_TYPE_CHOICES.get(whole_type)
    if known is None:
        return TEXT_TYPE_BY_VLM_TYPE[whole_type]
    stated = text.get("model_type") or known[0]
    if stated not in known:
        raise CheckpointError(
            f"{file}: text_config has the model_type {quote(stated, 60)}; of a {whole_type} "
            f"{', '.join(known)} are read"
        )
    return str(stated)


class LanguageModelContainer:
    """The tensors of the language model, under the names of the text class."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.metadata: dict[str, Any] = container.metadata
        self._sources: dict[str, _TensorSource] = {}
        for name in container.names():
            if not name.startswith(NON_TEXT_PREFIXES):
                self._sources |= _sources_from_stored_tensor(name, container)

    def names(self) -> list[str]:
        """Return the names of all tensors of the language model."""
        return list(self._sources)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        source = self._find_source(name)
        info = self._container.tensor_info(source.name)
        if source.expert is None:
            return TensorInfo(name, info.shape, info.dtype, info.nbytes)
        experts, rows, columns = info.shape
        size = info.nbytes // (experts * source.parts)
        return TensorInfo(name, (rows // source.parts, columns), info.dtype, size)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        source = self._find_source(name)
        tensor = self._container.get(source.name)
        if source.expert is None:
            return tensor
        return tensor[source.expert].chunk(source.parts)[source.part]

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return self._container.files()

    def _find_source(self, name: str) -> _TensorSource:
        if name not in self._sources:
            raise no_such_tensor_error(self.files()[0], name)
        return self._sources[name]


def as_language_model_container(config: Mapping[str, Any], container: Container) -> Container:
    """The container of a checkpoint whose names may be those of a vision-language model."""
    chosen = any(config.get("model_type") in types for types in TEXT_MODEL_TYPE_CHOICES.values())
    if config.get("model_type") in (*TEXT_TYPE_BY_VLM_TYPE.values(), *STACKED_TEXT_TYPES) or (
        chosen and any(name.startswith(NON_TEXT_PREFIXES) for name in container.names())
    ):
        return LanguageModelContainer(container)
    return container


def _sources_from_stored_tensor(name: str, container: Container) -> dict[str, _TensorSource]:
    """The language model's tensors that are in one of the files."""
    old = next((prefix for prefix in TEXT_PREFIX_BY_VLM_PREFIX if name.startswith(prefix)), "")
    text = TEXT_PREFIX_BY_VLM_PREFIX.get(old, "") + name.removeprefix(old)
    if not name.endswith(STACKED_EXPERT_SUFFIXES):
        return {text: _TensorSource(name)}
    shape = container.tensor_info(name).shape
    if len(shape) != 3:
        raise CheckpointError(f"{name} has the shape {list(shape)}, where experts are stacked")
    stem, _, matrix = text.rpartition(".")
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    return {
        f"{stem}.{expert}.{part}.weight": _TensorSource(name, expert, index, len(parts))
        for expert in range(shape[0])
        for index, part in enumerate(parts)
    }

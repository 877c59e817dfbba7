"""MiniGPT-4 as published: a LLaMA checkpoint and vision files, presented as one container.

The vision files are EVA's ViT-g (``blocks.*``), BLIP-2's Q-Former (``Qformer.*``, ``query_tokens``,
``ln_vision.*``) and MiniGPT-4's own projection (``llama_proj.*``). They are recognized by their
tensors, not by their file names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, no_such_tensor_error
from modelmill.checkpoint.pth import PthFiles
from modelmill.checkpoint.safetensors import SafetensorsFiles
from modelmill.checkpoint.side_files import read_json
from modelmill.core.errors import CheckpointError, TensorMismatch, UnknownArchitecture
from modelmill.core.quoting import quote

MODEL_TYPE = "minigpt4"
SETTINGS_FILE = "minigpt4.json"
IMAGE_CHAT_FILE = "image_chat.json"
LANGUAGE_PREFIX = "llama_model."
"""Prefix of the language model's tensors, as in upstream's own state dict."""
VISION_ENCODER_PREFIX = "visual_encoder."
# generation settings of upstream's demo
GENERATION_DEFAULTS = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_new_tokens": 300}
PROMPT_STYLE_CHOICES = ("first", "current")
_VISION_PARTS = (
    (
        "vision_encoder",
        "EVA's ViT-g (blocks.0.attn.qkv.weight)",
        r"(visual_encoder\.)?blocks\.0\.attn\.qkv\.weight",
    ),
    ("qformer", "BLIP-2's Q-Former (query_tokens)", r"query_tokens"),
    ("projection", "MiniGPT-4's projection (llama_proj.weight)", r"llama_proj\.weight"),
)


class MiniGpt4Container:
    """A language model's tensors after ``llama_model.``, and those of the vision files.

    A name that occurs in several vision files is taken from the last: vision encoder, Q-Former,
    projection is the order in which upstream loads them. Raises CheckpointError if a part is
    missing or a file is none of them.
    """

    def __init__(self, language: Container, files: Sequence[Path]) -> None:
        self._language = language
        self._vision_tensors: dict[str, tuple[Container, str]] = {}
        opened = sorted(
            (_open_and_identify_vision_file(path) for path in files), key=lambda part: part[0]
        )
        part_numbers_found = {number for part_numbers, _ in opened for number in part_numbers}
        missing = [
            what
            for number, (_, what, _) in enumerate(_VISION_PARTS)
            if number not in part_numbers_found
        ]
        if missing:
            file_names = ", ".join(path.name for path in files) or "no file"
            raise CheckpointError(
                f"the vision files are incomplete: {' and '.join(missing)} not in {file_names}"
            )
        for _, container in opened:
            bare = any(name.startswith("blocks.") for name in container.names())
            for name in container.names():
                self._vision_tensors[VISION_ENCODER_PREFIX + name if bare else name] = (
                    container,
                    name,
                )
        self._files = [file for _, container in opened for file in container.files()]
        self.metadata: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [LANGUAGE_PREFIX + name for name in self._language.names()] + list(
            self._vision_tensors
        )

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        container, file_name = self._locate_tensor(name)
        info = container.tensor_info(file_name)
        return TensorInfo(name, info.shape, info.dtype, info.nbytes)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        container, file_name = self._locate_tensor(name)
        return container.get(file_name)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return [*self._language.files(), *self._files]

    def _locate_tensor(self, name: str) -> tuple[Container, str]:
        if name.startswith(LANGUAGE_PREFIX):
            return self._language, name.removeprefix(LANGUAGE_PREFIX)
        if name not in self._vision_tensors:
            raise no_such_tensor_error(self._files[0], name)
        return self._vision_tensors[name]


def is_minigpt4_folder(folder: Path) -> bool:
    """Return whether a folder contains the published parts, or a minigpt4.json with their paths."""
    if (folder / SETTINGS_FILE).is_file():
        return True
    plain = any(
        (folder / name).exists()
        for name in ("config.json", "model.safetensors", "pytorch_model.bin")
    )
    return (
        not plain and bool(_weight_files(folder)) and len(_find_language_model_folders(folder)) == 1
    )


def find_minigpt4_parts_and_settings(folder: Path) -> tuple[Path, list[Path], dict[str, Any]]:
    """Return the language model, the vision files and the settings of such a folder.

    Raises:
        CheckpointError: if there is not exactly one language model.
    """
    settings = read_json(folder / SETTINGS_FILE) if (folder / SETTINGS_FILE).is_file() else {}
    check_minigpt4_settings(settings, folder / SETTINGS_FILE)
    languages = (
        [folder / settings["language"]]
        if "language" in settings
        else _find_language_model_folders(folder)
    )
    if len(languages) != 1:
        raise CheckpointError(
            f"{folder}: holds {len(languages)} folders with a config.json; the language model is "
            "one, or is named "
            f'in {SETTINGS_FILE} as "language"'
        )
    files = (
        [folder / name for name in settings["vision"]]
        if "vision" in settings
        else _weight_files(folder)
    )
    return languages[0], files, settings


def check_minigpt4_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for an invalid minigpt4.json."""
    tables = ("vision_encoder", "tower", "qformer")
    known = {"language", "vision", "prompt", *tables}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise CheckpointError(
            f"{path}: {quote(unknown[0])} is not a setting; known are {', '.join(sorted(known))}"
        )
    vision = settings.get("vision", [])
    sizes = [value for table in tables for value in _settings_table(settings, table).values()]
    fine = (
        isinstance(settings.get("language", ""), str)
        and isinstance(vision, list)
        and all(isinstance(name, str) for name in vision)
        and settings.get("prompt", "first") in PROMPT_STYLE_CHOICES
        and all(isinstance(settings.get(table, {}), dict) for table in tables)
        and all(type(value) is int and value > 0 for value in sizes)
    )
    if not fine:
        raise CheckpointError(
            f'{path}: "language" is a folder, "vision" a list of files, "prompt" first or current, '
            '"vision_encoder" and "qformer" integers by name'
        )


def config_from_parts(
    language: Mapping[str, Any], vision: MiniGpt4Container, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the language model's config with the vision sizes under "image_embedder".

    Sizes follow from the tensors, except the number of used blocks (39, as published) and the
    numbers of heads.

    Raises:
        UnknownArchitecture: if the language model is not a LLaMA.
        CheckpointError: if sizes do not fit.
    """
    if language.get("model_type") != "llama":
        model_type = quote(language.get("model_type"))
        raise UnknownArchitecture(
            f"the language model is of model_type {model_type}; MiniGPT-4's is a llama"
        )
    width, _, _, patch = _require_num_dims(
        vision, VISION_ENCODER_PREFIX + "patch_embed.proj.weight", 4
    )
    _, places, _ = _require_num_dims(vision, VISION_ENCODER_PREFIX + "pos_embed", 3)
    _, queries, asking = _require_num_dims(vision, "query_tokens", 3)
    vision_encoder = {
        "width": width,
        "depth": 39,
        "heads": 16,
        "inner": _require_num_dims(vision, VISION_ENCODER_PREFIX + "blocks.0.mlp.fc1.weight", 2)[0],
        "image": patch * round((places - 1) ** 0.5),
        "patch": patch,
    }
    qformer = {
        "width": asking,
        "depth": _count_layers(vision.names(), r"Qformer\.bert\.encoder\.layer\.(\d{1,6})\..*"),
        "heads": 12,
        "inner": _require_num_dims(
            vision, "Qformer.bert.encoder.layer.0.intermediate_query.dense.weight", 2
        )[0],
        "image_width": width,
        "cross_attention_frequency": 2,
        "queries": queries,
    }
    return {
        **language,
        "model_type": MODEL_TYPE,
        "image_embedder": {
            "vision_encoder": vision_encoder
            | _settings_table(settings, "tower")
            | _settings_table(settings, "vision_encoder"),
            "qformer": qformer | _settings_table(settings, "qformer"),
        },
    }


def encode_chat_format_file(settings: Mapping[str, Any], num_query_tokens: int) -> bytes:
    """Return the engine's chat format, as a file of its tokenizer's folder."""
    content = {
        "format": MODEL_TYPE,
        "prompt": settings.get("prompt", "first"),
        "tokens": num_query_tokens,
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _open_and_identify_vision_file(path: Path) -> tuple[list[int], Container]:
    """Return which parts a file contains, and the opened file."""
    if path.suffix == ".safetensors":
        container: Container = SafetensorsFiles([path])
    elif path.suffix in (".pth", ".pt", ".bin"):
        container = PthFiles([path])
    else:
        raise CheckpointError(f"{path}: vision files must be .pth, .pt, .bin or .safetensors files")
    names = container.names()
    part_numbers = [
        number
        for number, (_, _, pattern) in enumerate(_VISION_PARTS)
        if any(re.fullmatch(pattern, name) for name in names)
    ]
    if not part_numbers:
        raise CheckpointError(
            f"{path}: holds neither {', nor '.join(what for _, what, _ in _VISION_PARTS)}"
        )
    return part_numbers, container


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files in the folder itself."""
    return sorted(
        f
        for f in folder.iterdir()
        if f.suffix in (".pth", ".pt", ".bin", ".safetensors") and f.is_file()
    )


def _find_language_model_folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and (f / "config.json").is_file())


def _settings_table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name, {})
    return section if isinstance(section, dict) else {}


def _require_num_dims(vision: MiniGpt4Container, name: str, dims: int) -> tuple[int, ...]:
    shape = vision.tensor_info(name).shape
    if len(shape) != dims or 0 in shape:
        raise TensorMismatch(
            f"{name} has shape {list(shape)} where {dims} dimensions above 0 are needed"
        )
    return shape


def _count_layers(names: Sequence[str], pattern: str) -> int:
    numbers = [int(match[1]) for match in (re.fullmatch(pattern, name) for name in names) if match]
    return max(numbers, default=-1) + 1

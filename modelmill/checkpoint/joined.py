"""MiniGPT-4 as it is published: a LLaMA checkpoint and the eyes in files of their own, seen as one container.

The eyes are EVA's ViT-g (``blocks.*``), BLIP-2's Q-Former (``Qformer.*``, ``query_tokens``, ``ln_vision.*``) and
MiniGPT-4's own projection (``llama_proj.*``). They are told apart by what they hold, not by their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container, TensorInfo, no_such_tensor
from modelmill.checkpoint.folder import read_json
from modelmill.checkpoint.pth import PthFiles
from modelmill.checkpoint.safetensors import SafetensorsFiles
from modelmill.core.errors import CheckpointError, TensorMismatch, UnknownArchitecture
from modelmill.core.quote import quoted

MODEL_TYPE = "minigpt4"
SETTINGS = "minigpt4.json"
CHAT = "image_chat.json"
LANGUAGE = "llama_model."
"""In front of the language model's tensors, as in upstream's own state dict."""
EYES = "visual_encoder."
# what upstream generates with: its demo's settings
GENERATION = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_new_tokens": 300}
PROMPTS = ("first", "current")
_KINDS = (
    ("tower", "EVA's ViT-g (blocks.0.attn.qkv.weight)", r"(visual_encoder\.)?blocks\.0\.attn\.qkv\.weight"),
    ("qformer", "BLIP-2's Q-Former (query_tokens)", r"query_tokens"),
    ("projection", "MiniGPT-4's projection (llama_proj.weight)", r"llama_proj\.weight"),
)


class Joined:
    """A language model's tensors behind ``llama_model.``, and those of the eyes' files.

    A name that several of the eyes' files hold is taken from the last: tower, Q-Former, projection is the order in
    which upstream loads them. Raises CheckpointError where a part is missing or a file is none of them.
    """

    def __init__(self, language: Container, files: Sequence[Path]) -> None:
        self._language = language
        self._eyes: dict[str, tuple[Container, str]] = {}
        opened = sorted((_part(path) for path in files), key=lambda part: part[0])
        found = {kind for kinds, _ in opened for kind in kinds}
        missing = [what for number, (_, what, _) in enumerate(_KINDS) if number not in found]
        if missing:
            given = ", ".join(path.name for path in files) or "no file"
            raise CheckpointError(f"the eyes of this model are incomplete: {' and '.join(missing)} not in {given}")
        for _, container in opened:
            bare = any(name.startswith("blocks.") for name in container.names())
            for name in container.names():
                self._eyes[EYES + name if bare else name] = (container, name)
        self._files = [file for _, container in opened for file in container.files()]
        self.metadata: dict[str, Any] = {}

    def names(self) -> list[str]:
        return [LANGUAGE + name for name in self._language.names()] + list(self._eyes)

    def info(self, name: str) -> TensorInfo:
        container, theirs = self._where(name)
        info = container.info(theirs)
        return TensorInfo(name, info.shape, info.dtype, info.nbytes)

    def get(self, name: str) -> torch.Tensor:
        container, theirs = self._where(name)
        return container.get(theirs)

    def files(self) -> list[Path]:
        return [*self._language.files(), *self._files]

    def _where(self, name: str) -> tuple[Container, str]:
        if name.startswith(LANGUAGE):
            return self._language, name.removeprefix(LANGUAGE)
        if name not in self._eyes:
            raise no_such_tensor(self._files[0], name)
        return self._eyes[name]


def is_joined(folder: Path) -> bool:
    """Whether a folder holds the published parts side by side, or says in minigpt4.json where they are."""
    if (folder / SETTINGS).is_file():
        return True
    plain = any((folder / name).exists() for name in ("config.json", "model.safetensors", "pytorch_model.bin"))
    return not plain and bool(_weights(folder)) and len(_languages(folder)) == 1


def parts_of(folder: Path) -> tuple[Path, list[Path], dict[str, Any]]:
    """(the language model, the eyes' files, minigpt4.json's settings) of such a folder. Raises CheckpointError."""
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    checked(settings, folder / SETTINGS)
    languages = [folder / settings["language"]] if "language" in settings else _languages(folder)
    if len(languages) != 1:
        raise CheckpointError(
            f"{folder}: holds {len(languages)} folders with a config.json; the language model is one, or is named "
            f'in {SETTINGS} as "language"'
        )
    files = [folder / name for name in settings["vision"]] if "vision" in settings else _weights(folder)
    return languages[0], files, settings


def checked(settings: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError for a minigpt4.json that says something else than it may."""
    tables = ("tower", "qformer")
    known = {"language", "vision", "prompt", *tables}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise CheckpointError(f"{where}: {quoted(unknown[0])} is no setting; known are {', '.join(sorted(known))}")
    vision = settings.get("vision", [])
    sizes = [value for table in tables for value in _table(settings, table).values()]
    fine = (
        isinstance(settings.get("language", ""), str)
        and isinstance(vision, list)
        and all(isinstance(name, str) for name in vision)
        and settings.get("prompt", "first") in PROMPTS
        and all(isinstance(settings.get(table, {}), dict) for table in tables)
        and all(type(value) is int and value > 0 for value in sizes)
    )
    if not fine:
        raise CheckpointError(
            f'{where}: "language" is a folder, "vision" a list of files, "prompt" first or current, '
            '"tower" and "qformer" whole numbers by name'
        )


def config_of(language: Mapping[str, Any], eyes: Joined, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's config with the eyes' sizes under "reader".

    Sizes follow from the tensors, but for those that no tensor tells: how many blocks are used (39, as published) and
    the numbers of heads. Raises UnknownArchitecture for a language model that is no LLaMA, CheckpointError.
    """
    if language.get("model_type") != "llama":
        found = quoted(language.get("model_type"))
        raise UnknownArchitecture(
            f"the language model behind the eyes is of model_type {found}; MiniGPT-4's is a llama"
        )
    width, _, _, patch = _shape(eyes, EYES + "patch_embed.proj.weight", 4)
    _, places, _ = _shape(eyes, EYES + "pos_embed", 3)
    _, queries, asking = _shape(eyes, "query_tokens", 3)
    tower = {
        "width": width,
        "depth": 39,
        "heads": 16,
        "inner": _shape(eyes, EYES + "blocks.0.mlp.fc1.weight", 2)[0],
        "image": patch * round((places - 1) ** 0.5),
        "patch": patch,
    }
    qformer = {
        "width": asking,
        "depth": _count(eyes.names(), r"Qformer\.bert\.encoder\.layer\.(\d{1,6})\..*"),
        "heads": 12,
        "inner": _shape(eyes, "Qformer.bert.encoder.layer.0.intermediate_query.dense.weight", 2)[0],
        "seen": width,
        "every": 2,
        "queries": queries,
    }
    return {
        **language,
        "model_type": MODEL_TYPE,
        "reader": {
            "tower": tower | _table(settings, "tower"),
            "qformer": qformer | _table(settings, "qformer"),
        },
    }


def chat_file(settings: Mapping[str, Any], queries: int) -> bytes:
    """What the chat format of the engine is, as a file of its tokenizer's folder."""
    told = {"format": MODEL_TYPE, "prompt": settings.get("prompt", "first"), "tokens": queries}
    return (json.dumps(told, indent=1, sort_keys=True) + "\n").encode()


def _part(path: Path) -> tuple[list[int], Container]:
    """(which of the kinds a file holds, the file)."""
    if path.suffix == ".safetensors":
        container: Container = SafetensorsFiles([path])
    elif path.suffix in (".pth", ".pt", ".bin"):
        container = PthFiles([path])
    else:
        raise CheckpointError(f"{path}: the eyes are .pth, .pt, .bin or .safetensors files")
    names = container.names()
    kinds = [
        number for number, (_, _, pattern) in enumerate(_KINDS) if any(re.fullmatch(pattern, name) for name in names)
    ]
    if not kinds:
        raise CheckpointError(f"{path}: holds neither {', nor '.join(what for _, what, _ in _KINDS)}")
    return kinds, container


def _weights(folder: Path) -> list[Path]:
    """The weight files that lie in the folder itself."""
    return sorted(f for f in folder.iterdir() if f.suffix in (".pth", ".pt", ".bin", ".safetensors") and f.is_file())


def _languages(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and (f / "config.json").is_file())


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name, {})
    return found if isinstance(found, dict) else {}


def _shape(eyes: Joined, name: str, dims: int) -> tuple[int, ...]:
    shape = eyes.info(name).shape
    if len(shape) != dims or 0 in shape:
        raise TensorMismatch(f"{name} has shape {list(shape)} where {dims} dimensions above 0 are needed")
    return shape


def _count(names: Sequence[str], pattern: str) -> int:
    found = [int(match[1]) for match in (re.fullmatch(pattern, name) for name in names) if match]
    return max(found, default=-1) + 1

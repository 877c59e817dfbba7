"""Small files beside the weights: configs, tokenizers and shard indexes, read with limits."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote

MAX_SIDE_FILE_BYTES = 128 << 20
"""Largest side file in bytes: real tokenizer.json files and shard indexes have some 35 MB."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "pieces.json",
)
"""Files of a tokenizer or a chat format; other files in the folder are ignored."""

EXTRA_TEMPLATE_PATTERN = re.compile(r"additional_chat_templates/[\w-]+\.jinja", re.ASCII)
"""Further chat templates by name, as transformers 5 writes them beside chat_template.jinja."""


TOKENIZER_DETECTION_FILES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "pieces.json",
)
"""Files of which a tokenizer has one; other files by save_pretrained only describe it."""

SPECIAL_FLOAT_BY_NAME = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return a folder's tokenizer files by name: the known names, *.tiktoken, more templates.

    It is empty without a vocabulary: such a checkpoint has no tokenizer.
    """
    tiktoken = sorted(file.name for file in folder.glob("*.tiktoken"))
    if not tiktoken and not any((folder / name).is_file() for name in TOKENIZER_DETECTION_FILES):
        return {}
    templates = sorted(
        name
        for name in (file.relative_to(folder).as_posix() for file in folder.glob("*/*.jinja"))
        if EXTRA_TEMPLATE_PATTERN.fullmatch(name)
    )
    return {
        name: read_side_file(folder / name)
        for name in (*TOKENIZER_FILES, *tiktoken, *templates)
        if (folder / name).is_file()
    }


def read_side_file(path: Path) -> bytes:
    """Return a side file's bytes; raises CheckpointError if it is missing or too large."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: is missing; a checkpoint's folder has it beside the weights"
        )
    size = path.stat().st_size
    if size > MAX_SIDE_FILE_BYTES:
        raise CorruptCheckpoint(
            f"{path}: has {size} bytes, more than the {MAX_SIDE_FILE_BYTES} such a file may have"
        )
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; raises CorruptCheckpoint for other content.

    transformers writes an infinite float as ``{"__float__": "Infinity"}``: it is read as the float.
    """
    try:
        value = json.loads(read_side_file(path), object_hook=_decode_special_float_object)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path}: is not valid JSON ({error}); fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: holds no JSON object at its top")
    return value


def _decode_special_float_object(value: dict[str, Any]) -> Any:
    if value.keys() != {"__float__"}:
        return value
    return SPECIAL_FLOAT_BY_NAME.get(str(value["__float__"]), value)


def read_shard_index(path: Path) -> dict[str, str]:
    """Return the weight_map of a shard index: tensor name -> shard file name.

    Shards must be plain names in the index's own folder (a hub cache may link them elsewhere, an
    index may not).

    Raises:
        CorruptCheckpoint: otherwise, or if a shard is missing.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpoint(f"{path}: has no weight_map")
    checked: set[str] = set()
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptCheckpoint(f"{path}: names no file for {quote(name)}")
        if shard in checked:
            continue
        if shard in ("", ".", "..") or any(c in shard for c in "/\\\0:"):
            raise CorruptCheckpoint(
                f"{path}: points outside its folder: {quote(shard)}; refusing to follow"
            )
        if not (path.parent / shard).is_file():
            raise CorruptCheckpoint(
                f"{path}: names the shard {shard}, which is missing; finish the download"
            )
        checked.add(shard)
    return weight_map

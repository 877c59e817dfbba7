"""Opens a checkpoint in any container, under Hugging Face names, config and values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint import blip2, gpt_oss_experts
from modelmill.checkpoint.chat_format import add_builtin_chat_format
from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.checkpoint.delta import DeltaContainer
from modelmill.checkpoint.gguf import GgufFile
from modelmill.checkpoint.gguf_hf import GgufAsHf
from modelmill.checkpoint.legacy_model_types import with_current_model_type
from modelmill.checkpoint.minigpt4_parts import (
    GENERATION_DEFAULTS,
    IMAGE_CHAT_FILE,
    LANGUAGE_PREFIX,
    MiniGpt4Container,
    check_minigpt4_settings,
    config_from_parts,
    encode_chat_format_file,
    find_minigpt4_parts_and_settings,
    is_minigpt4_folder,
)
from modelmill.checkpoint.prequantized import QUANT_METHOD_BY_CONFIG_FILE, as_prequantized_container
from modelmill.checkpoint.pth import INDEX_FILE as PTH_INDEX
from modelmill.checkpoint.pth import PthFiles
from modelmill.checkpoint.pull import is_pullable_model_name
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout
from modelmill.checkpoint.safetensors import INDEX_FILE as SAFETENSORS_INDEX
from modelmill.checkpoint.safetensors import SafetensorsFiles
from modelmill.checkpoint.side_files import read_json, read_tokenizer_files
from modelmill.checkpoint.vlm_language_model import (
    as_language_model_container,
    split_language_model_config,
)
from modelmill.core.errors import CheckpointError, UnknownArchitecture
from modelmill.core.progress_callback import Progress
from modelmill.core.quoting import quote

HASH_CHUNK_BYTES = 1 << 22


@dataclass
class Checkpoint:
    """A model's weights, config and tokenizer files, always under Hugging Face names.

    Attributes:
        raw_container: the container under its own names (GGUF: blk.0.attn_q.weight).
        view: the same values under Hugging Face names; the same object if the names agree.
        language: the language model of a multimodal model.
        unread_config: keys by full name that the config was not made from, if it was made from
            other keys (GGUF, BLIP-2).
    """

    path: Path
    container: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    raw_container: Container
    view: Container
    side_files: dict[str, bytes] = field(default_factory=dict, repr=False)
    language: Checkpoint | None = None
    unread_config: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Return the config's model_type, the name of the model file; empty without a config."""
        return str(self.config.get("model_type", ""))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return self.view.names()

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype by Hugging Face name; raises TensorMismatch for an unknown one."""
        return self.view.tensor_info(name)

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU in its native dtype (GGUF block types as float32).

        It may share a mapped file's memory: copy before writing in place.
        """
        return self.view.get(name)

    def quant_layout(self, name: str) -> QuantLayout | None:
        """Return how a matrix is stored in few bits; None if it is not, or cannot be kept."""
        layout: QuantLayout | None = (
            self.view.quant_layout(name) if hasattr(self.view, "quant_layout") else None
        )
        return layout

    def read_quantized_matrix(self, name: str) -> QuantizedMatrix:
        """Return the integers of a matrix that has a quantization layout."""
        packed: QuantizedMatrix = self.view.read_quantized_matrix(name)  # type: ignore[attr-defined]
        return packed

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name; for a GGUF the generated gguf_vocab.json."""
        return dict(self.side_files)

    def fingerprint(self, on_progress: Progress | None = None) -> str:
        """Return the sha256 over config, tokenizer files and the content of the weight files."""
        files = self.raw_container.files()
        total = sum(file.stat().st_size for file in files)
        digest = hashlib.sha256(self._canonical_metadata_json())
        done = 0
        for file in files:
            content = hashlib.sha256()
            with file.open("rb") as stream:
                while chunk := stream.read(HASH_CHUNK_BYTES):
                    content.update(chunk)
                    done += len(chunk)
                    if on_progress is not None:
                        on_progress("fingerprint", done, total)
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + content.digest())
        return digest.hexdigest()

    def quick_fingerprint(self) -> str:
        """Return the sha256 over names, sizes, modification times, tensor headers and config.

        It detects changes without reading the weights.
        """
        digest = hashlib.sha256(self._canonical_metadata_json())
        for file in self.raw_container.files():
            fact = file.stat()
            digest.update(f"\0{file.name}\0{fact.st_size}\0{fact.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _canonical_metadata_json(self) -> bytes:
        """Return config, tokenizer files' digests and tensor headers in a canonical form."""
        headers = [
            (i.name, list(i.shape), i.dtype)
            for i in map(self.view.tensor_info, sorted(self.view.names()))
        ]
        side = {name: hashlib.sha256(data).hexdigest() for name, data in self.side_files.items()}
        facts = [self.container, self.config, self.generation_config, headers, side]
        return json.dumps(facts, sort_keys=True, default=str).encode()


def open_checkpoint(
    path: Path, *, delta: Path | None = None, vision: Sequence[Path] = ()
) -> Checkpoint:
    """Open a Hugging Face folder, or a single .gguf, .safetensors, .bin or .pth file.

    Only headers are read, and code in a checkpoint (auto_map) is never run. A single file without
    config.json has an empty config: original image models are published so.

    Args:
        path: the folder or file.
        delta: a second checkpoint whose tensors are added to the first one's (as Vicuna is
            published).
        vision: MiniGPT-4's vision files for this language model (see `minigpt4_parts`), and at most
            one minigpt4.json.

    Raises:
        CheckpointError: if something is missing.
        CorruptCheckpoint: if a file contradicts itself.
    """
    path = Path(path)
    settings: dict[str, Any] = {}
    if not vision and path.is_dir() and is_minigpt4_folder(path):
        language, vision, settings = find_minigpt4_parts_and_settings(path)
        return _combine_with_vision(path, _open_with_delta(language, delta), vision, settings)
    base = _open_with_delta(path, delta)
    if base.model_type in (blip2.BLIP2_TYPE, *blip2.INSTRUCTBLIP_TYPES) and not vision:
        return _blip2_as_minigpt4(base)
    if not vision:
        return base
    for file in (Path(f) for f in vision if Path(f).suffix == ".json"):
        settings = read_json(file)
        check_minigpt4_settings(settings, file)
    return _combine_with_vision(
        path, base, [Path(f) for f in vision if Path(f).suffix != ".json"], settings
    )


def _combine_with_vision(
    path: Path, language: Checkpoint, files: Sequence[Path], settings: Mapping[str, Any]
) -> Checkpoint:
    """Return a language model and its vision files as one checkpoint."""
    view = MiniGpt4Container(language.view, files)
    config = config_from_parts(language.config, view, settings)
    side = dict(language.side_files)
    if side:
        side[IMAGE_CHAT_FILE] = encode_chat_format_file(
            settings, config["image_embedder"]["qformer"]["queries"]
        )
    return Checkpoint(
        path=path,
        container=f"minigpt4/{language.container}",
        config=config,
        generation_config={**language.generation_config, **GENERATION_DEFAULTS},
        raw_container=view,
        view=view,
        side_files=side,
        language=language,
        unread_config=language.unread_config,
    )


def _blip2_as_minigpt4(checkpoint: Checkpoint) -> Checkpoint:
    """Return transformers' BLIP-2 as the parts of a MiniGPT-4."""
    config, text, unread = blip2.convert_blip2_config(checkpoint.config, checkpoint.path)
    view = blip2.Blip2AsMiniGpt4Container(checkpoint.view)
    depth = config["image_embedder"]["vision_encoder"]["depth"]
    # MiniGPT-4's vision encoder omits its last block, this one none
    if depth != view.num_vision_blocks:
        raise CheckpointError(
            f"{checkpoint.path}: config.json: num_hidden_layers of the vision encoder is "
            f"{quote(depth, 40)}, "
            f"the weights have {view.num_vision_blocks} layers"
        )
    words = blip2.PrefixStrippedView(view, LANGUAGE_PREFIX)
    side = dict(checkpoint.side_files)
    language = replace(checkpoint, config=text, raw_container=words, view=words)
    if side:
        side[IMAGE_CHAT_FILE] = blip2.encode_chat_format_file(
            config["image_embedder"]["qformer"]["queries"]
        )
    pictures = replace(checkpoint, config=config, raw_container=view, view=view)
    return replace(pictures, side_files=side, language=language, unread_config=unread)


def _open_with_delta(path: Path, delta: Path | None) -> Checkpoint:
    """Return a checkpoint with a second one added to it."""
    base = _open_path(path)
    if delta is None:
        return base
    added = _open_path(Path(delta))
    if added.model_type != base.model_type:
        raise CheckpointError(
            f"{delta}: the delta is of model_type {added.model_type}, its base of {base.model_type}"
        )
    view = DeltaContainer(base.view, added.view)
    return Checkpoint(
        path=path,
        container=base.container,
        config={**base.config, **added.config},
        generation_config={**base.generation_config, **added.generation_config},
        raw_container=view,
        view=view,
        side_files=added.side_files or base.side_files,
        unread_config={**base.unread_config, **added.unread_config},
    )


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        hint = (
            f"fetch the model with: modelmill pull {path.as_posix()}, and give the printed path"
            if is_pullable_model_name(path)
            else "give a checkpoint's folder or file"
        )
        raise CheckpointError(f"{path}: there is no such file or folder; {hint}")
    if not path.is_file():
        raise CheckpointError(f"{path}: is neither a folder nor a regular file")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors":
        return _read_config_and_make_checkpoint(
            path.parent, path, "safetensors", SafetensorsFiles([path])
        )
    if path.suffix in (".bin", ".pth", ".pt"):
        return _read_config_and_make_checkpoint(path.parent, path, "pth", PthFiles([path]))
    raise CheckpointError(
        f"{path}: not a .gguf, .safetensors, .bin or .pth file; give a checkpoint's folder"
    )


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / SAFETENSORS_INDEX).is_file():
        return _read_config_and_make_checkpoint(
            folder, folder, "safetensors", SafetensorsFiles.from_index(folder)
        )
    if (folder / "model.safetensors").is_file():
        weights = SafetensorsFiles([folder / "model.safetensors"])
        return _read_config_and_make_checkpoint(folder, folder, "safetensors", weights)
    if (folder / PTH_INDEX).is_file():
        return _read_config_and_make_checkpoint(folder, folder, "pth", PthFiles.from_index(folder))
    if (folder / "pytorch_model.bin").is_file():
        return _read_config_and_make_checkpoint(
            folder, folder, "pth", PthFiles([folder / "pytorch_model.bin"])
        )
    for suffix, opener in (
        (".gguf", lambda file: _open_gguf(file)),
        (
            ".safetensors",
            lambda file: _read_config_and_make_checkpoint(
                folder, folder, "safetensors", SafetensorsFiles([file])
            ),
        ),
        (
            ".pth",
            lambda file: _read_config_and_make_checkpoint(folder, folder, "pth", PthFiles([file])),
        ),
    ):
        matches = sorted(
            file for file in folder.iterdir() if file.suffix == suffix and file.is_file()
        )
        if len(matches) == 1:
            return opener(matches[0])
        if matches:
            raise CheckpointError(
                f"{folder}: holds {len(matches)} {suffix} files and no index; name one of them"
            )
    raise CheckpointError(
        f"{folder}: holds no weights (model.safetensors, its index, pytorch_model.bin or a .gguf "
        "file); give the folder or file that has them"
    )


def _read_config_and_make_checkpoint(
    folder: Path, path: Path, container: str, weights: Container
) -> Checkpoint:
    alone = path.is_file() and not (folder / "config.json").exists()
    config = {} if alone else read_json(folder / "config.json")
    if not alone and not isinstance(config.get("model_type"), str):
        raise UnknownArchitecture(
            f"{folder / 'config.json'}: names no model_type; add the family's name"
        )
    config, left_out = split_language_model_config(
        with_current_model_type(config), folder / "config.json"
    )
    weights = as_language_model_container(config, weights)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    for name, method in QUANT_METHOD_BY_CONFIG_FILE.items():
        if not alone and "quantization_config" not in config and (folder / name).is_file():
            config["quantization_config"] = {"quant_method": method, **read_json(folder / name)}
    view = weights
    if config.get("model_type") == gpt_oss_experts.MODEL_TYPE:
        gpt_oss_experts.check_mxfp4_method(config.get("quantization_config"), path)
        view = gpt_oss_experts.GptOssExpertContainer(weights)
    elif quantization := config.get("quantization_config"):
        transposed = config.get("model_type") == "gpt2"
        view = as_prequantized_container(weights, quantization, path, transposed=transposed)
    return Checkpoint(
        path=path,
        container=container,
        config=config,
        generation_config=generation,
        raw_container=weights,
        view=view,
        side_files=add_builtin_chat_format(read_tokenizer_files(folder), config, generation),
        unread_config=left_out,
    )


def _open_gguf(path: Path) -> Checkpoint:
    raw = GgufFile(path)
    if str(raw.metadata.get("split.count", 0)) not in ("0", "1"):
        raise CheckpointError(
            f"{path}: is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    view = GgufAsHf(raw)
    has_vocabulary = raw.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")
    files = {"gguf_vocab.json": view.tokenizer_metadata_json()} if has_vocabulary else {}
    return Checkpoint(
        path=path,
        container="gguf",
        config=view.config,
        generation_config=view.generation_config,
        raw_container=raw,
        view=view,
        side_files=add_builtin_chat_format(files, view.config, view.generation_config),
        unread_config=view.unread,
    )

"""Calibration sequences: from a jsonl of texts, or from the built-in texts.

Those of a model that reads images come from ``builder.multimodal_calibration``.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.ops.registry import Ops
from modelmill.text.image_chat import IMAGE_CHAT_FILE
from modelmill.text.tokenizer_loader import load_tokenizer

BUILTIN_SOURCE = "modelmill's own text"
TEXT_KEYS = ("text", "article", "prompt")
IMAGE_KEYS = {"image", "images"}
"""Keys of a line that name images."""
NUM_BUILTIN_PARAGRAPHS = 1600
MIN_CALIBRATION_TOKENS = 128


@dataclass(frozen=True)
class CalibrationSource:
    """Texts to calibrate on: at most num_samples sequences of max_length tokens.

    Attributes:
        path: None for the built-in texts.
        digest: sha256 of the file or the text.
        image_digest: sha256 of the image files, if the model reads images.
    """

    path: Path | None
    digest: str
    num_samples: int
    max_length: int
    image_digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry; evaluations refuse the engine's calibration file."""
        name = BUILTIN_SOURCE if self.path is None else self.path.name
        facts = {
            "name": name,
            "sha256": self.digest,
            "samples": self.num_samples,
            "length": self.max_length,
        }
        return facts | ({"pictures": self.image_digest} if self.image_digest else {})


@dataclass(frozen=True)
class CalibrationSample:
    """One calibration sequence.

    Attributes:
        ids: token ids.
        images: [S, S, 3] uint8 by the position of their first token.
    """

    ids: list[int]
    images: Mapping[int, np.ndarray] = field(default_factory=dict)


def find_calibration_source(config: BuildConfig, max_model_len: int) -> CalibrationSource:
    """Return the calibration source of ``config``, hashed.

    max_model_len: the longest sequence of the model.

    Raises:
        UsageError: if a file is missing.
    """
    length = min(config.calibration_length, max_model_len)
    if config.calibration is None:
        return CalibrationSource(
            None,
            hashlib.sha256(generate_builtin_text().encode()).hexdigest(),
            config.calibration_samples,
            length,
        )
    path = Path(config.calibration)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"--calibration {path}: {reason}") from None
    return CalibrationSource(path, digest, config.calibration_samples, length)


def check_calibration_texts(
    source: CalibrationSource, tokenizer_files: Mapping[str, bytes]
) -> None:
    """Check the lines that calibration will read: a token has at least one byte.

    Raises:
        UsageError: if a line has no text, or all have too little.
    """
    if source.path is None or not tokenizer_files:
        return
    num_bytes = 0
    for text in read_calibration_texts(source.path):
        num_bytes += len(text.encode("utf-8", "surrogatepass"))
        if num_bytes >= source.num_samples * source.max_length:
            return
    if num_bytes < MIN_CALIBRATION_TOKENS:
        state = "is empty" if num_bytes == 0 else f"is too short: it has {num_bytes} bytes of text"
        raise UsageError(
            f"--calibration {source.path} {state}; at least {MIN_CALIBRATION_TOKENS} tokens are "
            "needed: pass a file with more text, or none for the built-in texts"
        )


def load_calibration_samples(
    source: CalibrationSource, files: Mapping[str, bytes], model: Any, seed: int
) -> list[CalibrationSample]:
    """Return the calibration sequences of a model, with or without images.

    Raises:
        UsageError: if the data cannot be used.
    """
    vocab = int(model.config.vocab)
    if chat_supports_images(files):
        # imported here, because it reads lines and texts with this module
        from modelmill.builder.multimodal_calibration import load_multimodal_samples

        samples = load_multimodal_samples(source, files, int(model.image_size))
    else:
        samples = [
            CalibrationSample(ids) for ids in load_calibration_ids(source, files, vocab, seed)
        ]
    name = "the calibration data" if source.path is None else f"--calibration {source.path}"
    check_calibration_ids([sample.ids for sample in samples], vocab, name)
    return samples


def embed_sample_images(
    samples: Sequence[CalibrationSample],
    model: Any,
    load_submodules: Callable[[str], None],
    ops: Ops,
) -> list[dict[int, torch.Tensor]]:
    """Return the embeddings of each sample's images by position."""
    pictures = [
        torch.as_tensor(picture) for sample in samples for picture in sample.images.values()
    ]
    if not pictures:
        return [{} for _ in samples]
    from modelmill.builder.multimodal_calibration import encode_images_releasing_embedder

    embeddings = iter(
        encode_images_releasing_embedder(model, torch.stack(pictures), load_submodules, ops)
    )
    return [{position: next(embeddings) for position in sample.images} for sample in samples]


def chat_supports_images(files: Mapping[str, bytes]) -> bool:
    """Return whether the chat format of these files supports images."""
    return IMAGE_CHAT_FILE in files


def load_calibration_ids(
    source: CalibrationSource, tokenizer_files: Mapping[str, bytes], vocab_size: int, seed: int
) -> list[list[int]]:
    """Return sequences of ``max_length`` ids, from texts joined and cut; the last may be shorter.

    The result is the same on every machine. An engine without a tokenizer is calibrated on random
    ids.

    Raises:
        UsageError: if the file has no texts.
    """
    if not tokenizer_files:
        if source.path is not None:
            raise UsageError(
                f"--calibration {source.path}: the checkpoint has no tokenizer for text; "
                "leave it out"
            )
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(
            0, vocab_size, (source.num_samples, source.max_length), generator=generator
        ).tolist()
    tokenizer = load_tokenizer(tokenizer_files)
    texts = (
        iter([generate_builtin_text()])
        if source.path is None
        else read_calibration_texts(source.path)
    )
    joined = TokenChunker(source.max_length)
    sequences: list[list[int]] = []
    for text in texts:
        sequences += joined.add_and_take_full(tokenizer.encode(text, bos=False))
        if len(sequences) >= source.num_samples:
            return sequences[: source.num_samples]
    return [*sequences, *joined.remainder()]


def check_calibration_ids(
    ids: Sequence[Sequence[int]], vocab: int, source_name: str = "the calibration data"
) -> None:
    """Check the number and range of calibration ids.

    source_name: where the ids come from, for messages.

    Raises:
        UsageError: if there are too few ids, or ids outside the vocabulary.
    """
    total = sum(map(len, ids))
    if not ids or not total:
        raise UsageError(
            f"{source_name} is empty: it contains no tokens; pass a file with texts, or "
            "none for the built-in texts"
        )
    if total < MIN_CALIBRATION_TOKENS:
        raise UsageError(
            f"{source_name} is too short: it has {total} tokens, at least "
            f"{MIN_CALIBRATION_TOKENS} are needed; pass more text, "
            "or a larger --calibration-samples, --calibration-length or --max-model-len"
        )
    if any(not 0 <= i < vocab for one in ids for i in one):
        raise UsageError(
            f"{source_name}: token ids must be between 0 and {vocab - 1}; it was made with another "
            "tokenizer"
        )


class TokenChunker:
    """Concatenates the ids of texts and cuts them into sequences of ``length``."""

    def __init__(self, length: int) -> None:
        self._length, self._remainder = length, list[int]()

    def add_and_take_full(self, ids: list[int]) -> list[list[int]]:
        """Add ids; return the sequences that are now full."""
        self._remainder += ids
        full = len(self._remainder) // self._length * self._length
        cut, self._remainder = self._remainder[:full], self._remainder[full:]
        return [cut[i : i + self._length] for i in range(0, full, self._length)]

    def remainder(self) -> list[list[int]]:
        """Return the last, partial sequence if it is long enough to be useful."""
        return [self._remainder] if len(self._remainder) > 1 else []


def read_calibration_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a jsonl, by "text", "article", "prompt" or the contents of "messages".

    Raises:
        UsageError: if a line has no text.
    """
    for number, value in read_jsonl_objects(path):
        if IMAGE_KEYS & set(value):
            raise UsageError(
                f"--calibration {path}, line {number}: has an image, which this model does not "
                "support; remove such lines"
            )
        yield text_from_line(value, path, number)


def read_jsonl_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, object) of each line of a jsonl that is not empty.

    Raises:
        UsageError: if a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"--calibration {path}: is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--calibration {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"--calibration {path}, line {number}: is not JSON") from None
        yield number, value if isinstance(value, dict) else {}


def text_from_line(line: Mapping[str, Any], path: Path, line_number: int) -> str:
    """Return the text of a line.

    Raises:
        UsageError: if the line has no text.
    """
    text = _find_text_field(line)
    if text is None:
        raise UsageError(
            f"--calibration {path}, line {line_number}: has no text under {', '.join(TEXT_KEYS)} "
            "or messages"
        )
    return text


def _find_text_field(line: Mapping[str, Any]) -> str | None:
    for key in TEXT_KEYS:
        if isinstance(line.get(key), str):
            return str(line[key])
    turns = line.get("messages")
    if not isinstance(turns, list):
        return None
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    texts = [content for content in contents if isinstance(content, str)]
    return "\n".join(texts) if texts else None


@cache
def generate_builtin_text() -> str:
    """Return random paragraphs made from the patterns of calibration.txt."""
    lines = (
        (resources.files("modelmill.builder") / "calibration.txt")
        .read_text(encoding="utf-8")
        .split("\n")
    )
    cut = lines.index("---")
    words = {
        name: filled.split(" | ")
        for name, _, filled in (line.partition(": ") for line in lines[1:cut])
    }
    patterns = [line.replace("\\n", "\n") for line in lines[cut + 1 :] if line]
    source = random.Random(0)
    made: list[str] = []
    while len(made) < NUM_BUILTIN_PARAGRAPHS:
        source.shuffle(patterns)
        made += [_fill_pattern(pattern, words, source) for pattern in patterns]
    return "\n\n".join(made[:NUM_BUILTIN_PARAGRAPHS])


def _fill_pattern(pattern: str, words: Mapping[str, list[str]], rng: random.Random) -> str:
    text = re.sub(
        r"\{(\w+)\}", lambda m: rng.choice(words[m[1]]) if m[1] in words else m[0], pattern
    )
    return text[:1].upper() + text[1:] if pattern.startswith("{") and text[:1].isalpha() else text

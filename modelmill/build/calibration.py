"""Where calibration tokens come from: a jsonl of texts, or a set of our own where none is given.

For a model with eyes see ``build.shown``: its lines may show pictures.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.text.tokenizer import load_tokenizer

OWN = "modelmill's own text"
KEYS = ("text", "article", "prompt")
PICTURES = {"image", "images"}
"""Under which a line names pictures."""
PARAGRAPHS = 1600


@dataclass(frozen=True)
class Source:
    """path None: our own text. digest: sha256 of the file or the text. samples sequences of length tokens at most.

    shown: sha256 of the pictures' files, where the model reads pictures.
    """

    path: Path | None
    digest: str
    samples: int
    length: int
    shown: str = ""

    def facts(self) -> dict[str, Any]:
        """For the manifest: evaluations refuse the file that an engine was calibrated on."""
        name = OWN if self.path is None else self.path.name
        told = {"name": name, "sha256": self.digest, "samples": self.samples, "length": self.length}
        return told | ({"pictures": self.shown} if self.shown else {})


def find_source(config: BuildConfig, longest: int) -> Source:
    """What ``config`` asks for, hashed. longest: what the model reads. Raises UsageError where a file is missing."""
    length = min(config.calibration_length, longest)
    if config.calibration is None:
        return Source(None, hashlib.sha256(own_text().encode()).hexdigest(), config.calibration_samples, length)
    path = Path(config.calibration)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"--calibration {path}: {reason}") from None
    return Source(path, digest, config.calibration_samples, length)


def load_ids(source: Source, tokenizer_files: Mapping[str, bytes], vocab: int, seed: int) -> list[list[int]]:
    """Sequences of ``length`` ids, texts joined and cut; the last may be shorter. The same on every machine.

    An engine without a tokenizer is calibrated on random ids. Raises UsageError for a file without texts.
    """
    if not tokenizer_files:
        if source.path is not None:
            raise UsageError(
                f"--calibration {source.path}: the checkpoint has no tokenizer to read texts with; leave it out"
            )
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, vocab, (source.samples, source.length), generator=generator).tolist()
    tokenizer = load_tokenizer(tokenizer_files)
    texts = iter([own_text()]) if source.path is None else texts_of(source.path)
    joined = Joined(source.length)
    found: list[list[int]] = []
    for text in texts:
        found += joined.add(tokenizer.encode(text, bos=False))
        if len(found) >= source.samples:
            return found[: source.samples]
    return [*found, *joined.left()]


class Joined:
    """Texts' ids one after another, cut into sequences of ``length``."""

    def __init__(self, length: int) -> None:
        self._length, self._rest = length, list[int]()

    def add(self, ids: list[int]) -> list[list[int]]:
        """The sequences that are full now."""
        self._rest += ids
        full = len(self._rest) // self._length * self._length
        cut, self._rest = self._rest[:full], self._rest[full:]
        return [cut[i : i + self._length] for i in range(0, full, self._length)]

    def left(self) -> list[list[int]]:
        """What is not full, if it can teach anything."""
        return [self._rest] if len(self._rest) > 1 else []


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a jsonl, by "text", "article", "prompt" or the contents of "messages". Raises UsageError."""
    for number, value in lines_of(path):
        if PICTURES & set(value):
            raise UsageError(
                f"--calibration {path}, line {number}: shows a picture, which this model does not read; leave such "
                "lines out"
            )
        yield text_of(value, path, number)


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line of a jsonl that is not empty. Raises UsageError."""
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


def text_of(value: Mapping[str, Any], path: Path, number: int) -> str:
    """The text of a line. Raises UsageError where it has none."""
    text = _text(value)
    if text is None:
        raise UsageError(f"--calibration {path}, line {number}: has no text under {', '.join(KEYS)} or messages")
    return text


def _text(value: Mapping[str, Any]) -> str | None:
    for key in KEYS:
        if isinstance(value.get(key), str):
            return str(value[key])
    turns = value.get("messages")
    if not isinstance(turns, list):
        return None
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    said = [content for content in contents if isinstance(content, str)]
    return "\n".join(said) if said else None


def own_text(seed: int = 0, paragraphs: int = PARAGRAPHS) -> str:
    """Paragraphs of calibration.txt's patterns, their words drawn anew each time."""
    lines = (resources.files("modelmill.build") / "calibration.txt").read_text(encoding="utf-8").split("\n")
    cut = lines.index("---")
    words = {name: filled.split(" | ") for name, _, filled in (line.partition(": ") for line in lines[1:cut])}
    patterns = [line.replace("\\n", "\n") for line in lines[cut + 1 :] if line]
    source = random.Random(seed)
    made: list[str] = []
    while len(made) < paragraphs:
        source.shuffle(patterns)
        made += [_filled(pattern, words, source) for pattern in patterns]
    return "\n\n".join(made[:paragraphs])


def _filled(pattern: str, words: Mapping[str, list[str]], source: random.Random) -> str:
    text = re.sub(r"\{(\w+)\}", lambda m: source.choice(words[m[1]]) if m[1] in words else m[0], pattern)
    return text[:1].upper() + text[1:] if pattern.startswith("{") and text[:1].isalpha() else text

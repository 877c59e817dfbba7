"""Where calibration tokens come from: a jsonl of texts, or a set of our own where none is given."""

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
PARAGRAPHS = 1600


@dataclass(frozen=True)
class Source:
    """path None: our own text. digest: sha256 of the file or the text. samples sequences of length tokens at most."""

    path: Path | None
    digest: str
    samples: int
    length: int

    def facts(self) -> dict[str, Any]:
        """For the manifest: evaluations refuse the file that an engine was calibrated on."""
        name = OWN if self.path is None else self.path.name
        return {"name": name, "sha256": self.digest, "samples": self.samples, "length": self.length}


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
    found: list[list[int]] = []
    rest: list[int] = []
    for text in texts:
        rest += tokenizer.encode(text, bos=False)
        while len(rest) >= source.length and len(found) < source.samples:
            found.append(rest[: source.length])
            rest = rest[source.length :]
        if len(found) == source.samples:
            return found
    return [*found, rest] if len(rest) > 1 else found


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a jsonl, by "text", "article", "prompt" or the contents of "messages". Raises UsageError."""
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
        text = _text(value) if isinstance(value, dict) else None
        if text is None:
            raise UsageError(f"--calibration {path}, line {number}: has no text under {', '.join(KEYS)} or messages")
        yield text


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

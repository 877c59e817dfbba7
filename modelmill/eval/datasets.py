"""Reading the data that evaluations run on: jsonl, ShareGPT conversations, traces of lengths."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError

MAX_TRACE_TOKENS = 4096
"""Longest prompt + answer that the trace's selection keeps."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class BenchRequest:
    """One request of a benchmark: prompt ids and the number of tokens to generate."""

    prompt: tuple[int, ...]
    output: int


def read_text(path: Path) -> str:
    """A UTF-8 text file, line ends untouched. Raises UsageError where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def refuse_calibration_file(path: Path, source: Mapping[str, Any]) -> None:
    """Raise UsageError where an engine was calibrated on this very file; source: its manifest's.

    What a recipe has seen, it answers better than what it has not.
    """
    calibration = source.get("calibration")
    if not isinstance(calibration, Mapping) or not path.is_file():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == calibration.get("sha256"):
        raise UsageError(
            f"{path} is what this engine was calibrated on; evaluate it on another file"
        )


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank.

    Raises UsageError naming the line that is none.
    """
    return parse_jsonl(read_text(path), path)


def parse_jsonl(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """``read_jsonl`` of a text that was read already from ``path``."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise UsageError(f"{path}, line {number}: is not a JSON object")
        yield number, value


@dataclass(frozen=True)
class Article:
    """An article and its reference summary."""

    id: str
    article: str
    highlights: str


def read_articles(path: Path, count: int | None) -> list[Article]:
    """The first ``count`` items of a jsonl with ``article`` and ``highlights``."""
    items: list[Article] = []
    for number, value in read_jsonl(path):
        if count is not None and len(items) >= count:
            break
        for key in ("article", "highlights"):
            if not isinstance(value.get(key), str):
                raise UsageError(f"{path}, line {number}: has no text {key!r}")
        items.append(Article(str(value.get("id", number)), value["article"], value["highlights"]))
    if not items:
        raise UsageError(f"{path} holds no items")
    return items


def read_dataset(
    path: Path, count: int | None, encode: Encode, limit: int, default_output: int
) -> list[BenchRequest]:
    """Requests from a ShareGPT json or a jsonl, those that fit ``limit`` tokens, the first
    ``count`` of them.

    An object gives its prompt as ``conversations`` or ``messages`` (the first turn asks, the second
    answers), ``prompt``, ``text``, ``article`` or ``turns``; its output length from the answer's
    tokens, or ``output_len``
    or ``max_tokens``, else ``default_output``.
    """
    work: list[BenchRequest] = []
    for value in _read_objects(path):
        if count is not None and len(work) >= count:
            break
        pair = _prompt_and_answer(value)
        if pair is None:
            continue
        prompt = encode(pair[0])
        told = value.get("output_len") or value.get("max_tokens")
        output = (
            int(told)
            if isinstance(told, int)
            else len(encode(pair[1]))
            if pair[1]
            else default_output
        )
        if len(prompt) >= 1 and output >= 1 and len(prompt) + output <= limit:
            work.append(BenchRequest(tuple(prompt), output))
    if not work:
        raise UsageError(f"{path} holds no conversation or prompt of at most {limit} tokens")
    return work


def _read_objects(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        yield from (value for _, value in read_jsonl(path))
        return
    text = read_text(path).removeprefix("\ufeff")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, list):
        raise UsageError(f"{path}: is not a list of conversations")
    yield from (value for value in values if isinstance(value, dict))


def _prompt_and_answer(value: dict[str, Any]) -> tuple[str, str] | None:
    """(prompt, answer or "") of one object; None where it holds none."""
    turns = value.get("conversations") or value.get("messages") or value.get("turns")
    if isinstance(turns, list) and turns:
        texts = [_turn_text(turn) for turn in turns]
        if texts[0] is None:
            return None
        asks_only = isinstance(turns[0], str)
        return texts[0], (texts[1] or "") if len(texts) > 1 and not asks_only else ""
    for key, answer in (("prompt", "completion"), ("text", ""), ("article", "highlights")):
        if isinstance(value.get(key), str):
            told = value.get(answer)
            return value[key], told if isinstance(told, str) else ""
    return None


def _turn_text(turn: Any) -> str | None:
    if isinstance(turn, dict):
        turn = turn.get("value", turn.get("content"))
    return turn if isinstance(turn, str) else None


def read_trace(path: Path, count: int, limit: int = MAX_TRACE_TOKENS) -> list[tuple[int, int]]:
    """(prompt length, output length) of ``count`` requests of a trace with ContextTokens and
    GeneratedTokens.

    Kept are rows with a context of at least 4 tokens, at least 1 generated token and a sum of at
    most ``limit``;
    they are shuffled with seed 0, and the first ``count`` are taken.
    """
    rows = csv.DictReader(read_text(path).splitlines())
    if not {"ContextTokens", "GeneratedTokens"} <= set(rows.fieldnames or ()):
        raise UsageError(f"{path} has no columns ContextTokens and GeneratedTokens")
    lengths = []
    for number, line in enumerate(rows, 2):
        try:
            context, output = int(line["ContextTokens"]), int(line["GeneratedTokens"])
        except (TypeError, ValueError):
            raise UsageError(f"{path}, line {number}: the lengths are no whole numbers") from None
        if context >= 4 and output >= 1 and context + output <= limit:
            lengths.append((context, output))
    if not lengths:
        raise UsageError(f"{path} holds no request of at most {limit} tokens")
    random.Random(0).shuffle(lengths)
    return lengths[:count]


def random_requests(
    lengths: Sequence[tuple[int, int]], vocab: int, seed: int
) -> list[BenchRequest]:
    """Requests of these (prompt, output) lengths with seeded token ids below ``vocab_size``."""
    source = random.Random(seed)
    return [
        BenchRequest(tuple(source.randrange(vocab) for _ in range(prompt)), output)
        for prompt, output in lengths
    ]

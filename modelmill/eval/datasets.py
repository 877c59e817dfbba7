"""Readers for evaluation data: jsonl, ShareGPT conversations, traces of request lengths."""

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

MAX_TRACE_REQUEST_TOKENS = 4096
"""Most prompt + output tokens of a request that ``sample_request_lengths`` keeps."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class BenchRequest:
    """One benchmark request: prompt ids and the number of tokens to generate."""

    prompt: tuple[int, ...]
    output: int


def read_text(path: Path) -> str:
    """Read a UTF-8 text file without changing its line ends.

    Raises UsageError if it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def refuse_calibration_file(path: Path, source: Mapping[str, Any]) -> None:
    """Reject evaluation on the file that the engine was calibrated on.

    A quantization recipe gives better results on its own calibration data.

    Args:
        path: the evaluation file.
        source: ``source`` of the engine's manifest.

    Raises:
        UsageError: if the file has the SHA-256 of the calibration file.
    """
    calibration = source.get("calibration")
    if not isinstance(calibration, Mapping) or not path.is_file():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == calibration.get("sha256"):
        raise UsageError(f"{path} is the file that this engine was calibrated on; use another file")


def read_numbered_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of each line that is not blank.

    Raises UsageError with the number of a line that is not a JSON object.
    """
    return parse_numbered_jsonl(read_text(path), path)


def parse_numbered_jsonl(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like ``read_numbered_jsonl``, of text that was already read from ``path``."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        value = _parse_json(line, f"{path}, line {number}")
        if not isinstance(value, dict):
            raise UsageError(f"{path}, line {number}: is not a JSON object")
        yield number, value


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{place}: is not JSON ({error})") from None


@dataclass(frozen=True)
class Article:
    """An article and its reference summary."""

    id: str
    article: str
    highlights: str


def read_articles(path: Path, count: int | None) -> list[Article]:
    """Read the first ``count`` items of a jsonl file with ``article`` and ``highlights``."""
    items: list[Article] = []
    for number, value in read_numbered_jsonl(path):
        if count is not None and len(items) >= count:
            break
        for key in ("article", "highlights"):
            if not isinstance(value.get(key), str):
                raise UsageError(f"{path}, line {number}: has no text {key!r}")
        items.append(Article(str(value.get("id", number)), value["article"], value["highlights"]))
    if not items:
        raise UsageError(f"{path} holds no items")
    return items


def read_bench_requests(
    path: Path, count: int | None, encode: Encode, limit: int, default_output: int
) -> list[BenchRequest]:
    """Read the first ``count`` requests of at most ``limit`` tokens from ShareGPT json or jsonl.

    The prompt is in ``conversations`` or ``messages`` (first turn: prompt, second turn: answer),
    ``prompt``, ``text``, ``article`` or ``turns``. The output length is ``output_len`` or
    ``max_tokens``, else the tokens of the answer, else ``default_output``.
    """
    requests: list[BenchRequest] = []
    for value in _read_objects(path):
        if count is not None and len(requests) >= count:
            break
        pair = _prompt_and_answer(value)
        if pair is None:
            continue
        prompt = encode(pair[0])
        length = value.get("output_len") or value.get("max_tokens")
        output = (
            int(length)
            if isinstance(length, int)
            else len(encode(pair[1]))
            if pair[1]
            else default_output
        )
        if len(prompt) >= 1 and output >= 1 and len(prompt) + output <= limit:
            requests.append(BenchRequest(tuple(prompt), output))
    if not requests:
        raise UsageError(f"{path} holds no conversation or prompt of at most {limit} tokens")
    return requests


def _read_objects(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        yield from (value for _, value in read_numbered_jsonl(path))
        return
    values = _parse_json(read_text(path).removeprefix("\ufeff"), str(path))
    if not isinstance(values, list):
        raise UsageError(f"{path}: is not a list of conversations")
    yield from (value for value in values if isinstance(value, dict))


def _prompt_and_answer(value: dict[str, Any]) -> tuple[str, str] | None:
    """Return (prompt, answer or "") of one object; None if it has no prompt."""
    turns = value.get("conversations") or value.get("messages") or value.get("turns")
    if isinstance(turns, list) and turns:
        texts = [_turn_text(turn) for turn in turns]
        if texts[0] is None:
            return None
        prompts_only = isinstance(turns[0], str)
        return texts[0], (texts[1] or "") if len(texts) > 1 and not prompts_only else ""
    for key, answer in (("prompt", "completion"), ("text", ""), ("article", "highlights")):
        if isinstance(value.get(key), str):
            reply = value.get(answer)
            return value[key], reply if isinstance(reply, str) else ""
    return None


def _turn_text(turn: Any) -> str | None:
    if isinstance(turn, dict):
        turn = turn.get("value", turn.get("content"))
    return turn if isinstance(turn, str) else None


def sample_request_lengths(
    path: Path, count: int, limit: int = MAX_TRACE_REQUEST_TOKENS
) -> list[tuple[int, int]]:
    """Read the prompt and output lengths of ``count`` requests from a csv trace.

    The columns are ContextTokens and GeneratedTokens. Rows with at least 4 context tokens, at least
    1 generated token and a sum of at most ``limit`` are kept, shuffled with seed 0, and the first
    ``count`` of them are returned.
    """
    rows = csv.DictReader(read_text(path).splitlines())
    if not {"ContextTokens", "GeneratedTokens"} <= set(rows.fieldnames or ()):
        raise UsageError(f"{path} has no columns ContextTokens and GeneratedTokens")
    lengths = []
    for number, line in enumerate(rows, 2):
        try:
            context, output = int(line["ContextTokens"]), int(line["GeneratedTokens"])
        except (TypeError, ValueError):
            raise UsageError(f"{path}, line {number}: the lengths must be integers") from None
        if context >= 4 and output >= 1 and context + output <= limit:
            lengths.append((context, output))
    if not lengths:
        raise UsageError(f"{path} holds no request of at most {limit} tokens")
    random.Random(0).shuffle(lengths)
    return lengths[:count]


def random_requests(
    lengths: Sequence[tuple[int, int]], vocab: int, seed: int
) -> list[BenchRequest]:
    """Make requests of these (prompt, output) lengths with seeded token ids below ``vocab``."""
    rng = random.Random(seed)
    return [
        BenchRequest(tuple(rng.randrange(vocab) for _ in range(prompt)), output)
        for prompt, output in lengths
    ]

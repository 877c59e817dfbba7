"""Summarize articles with an engine and with transformers, and score them with ROUGE.

Both get the same prompts, lengths and stop tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.config import config_to_dict
from modelmill.core.errors import TokenizerError, UsageError
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.progress_callback import Progress
from modelmill.core.types import SamplingParams
from modelmill.eval.datasets import Article, parse_numbered_jsonl, read_text
from modelmill.eval.report import device_name, versions
from modelmill.eval.rouge import ROUGE_TYPES, RougeScorer

SUMMARY_INSTRUCTION = "Summarize the following news article in three sentences.\n\n"
TLDR_SUFFIX = "\nTL;DR:"

RunFingerprint = dict[str, Any]
Ids = Sequence[int]
Answers = list[list[int]]


@dataclass(frozen=True)
class Summary:
    """One summary; ``seconds`` is its share of the time of its batch."""

    id: str
    prompt_tokens: int
    output_tokens: int
    text: str
    seconds: float


@dataclass(frozen=True)
class SummaryTask:
    """Prompt ids of each article, the most tokens of a summary, and the ids that end it."""

    articles: list[Article]
    prompts: list[list[int]]
    max_new_tokens: int
    eos_ids: tuple[int, ...]


@dataclass
class Summarizer(ABC):
    """Generates answer ids from prompt ids."""

    model: Any
    batch: int
    name: str

    @abstractmethod
    def answer_prompts(self, prompts: Sequence[Ids], max_new_tokens: int, eos_ids: Ids) -> Answers:
        """Return the greedy answer to each prompt, in order."""


@dataclass
class EngineSummarizer(Summarizer):
    """The engine (an LLM), with ``batch`` prompts in flight."""

    name: str = "modelmill"

    def answer_prompts(self, prompts: Sequence[Ids], max_new_tokens: int, eos_ids: Ids) -> Answers:
        """Return greedy answers; override all generation defaults of the checkpoint."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=tuple(eos_ids),
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            min_tokens=0,
            logits_processors=LogitsProcessors(),
        )
        answers = self.model.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], params, progress=False
        )
        return [list(answer.outputs[0].token_ids) for answer in answers]


@dataclass
class HfSummarizer(Summarizer):
    """The transformers model, in static batches of ``batch``."""

    name: str = "transformers"

    def answer_prompts(self, prompts: Sequence[Ids], max_new_tokens: int, eos_ids: Ids) -> Answers:
        """Return the greedy answer to each prompt, in order."""
        answers, _ = self.model.generate(prompts, max_new_tokens, eos_ids)
        return answers


def make_summary_task(
    llm: Any, articles: Sequence[Article], max_new_tokens: int, max_input: int | None = None
) -> SummaryTask:
    """Make the prompts of all articles.

    A prompt uses the chat template if the engine has one, else the article with "TL;DR:" after it.
    An article is cut at its end, in tokens, so that prompt and summary fit the engine and
    ``max_input``.

    Raises:
        TokenizerError: for an engine without a tokenizer.
        UsageError: if not even an empty article fits.
    """
    if llm.tokenizer is None:
        raise TokenizerError(
            "this is an ids-only engine (no tokenizer); summaries need a checkpoint with a "
            "tokenizer"
        )
    max_prompt_tokens = llm.engine_core.max_model_len - max_new_tokens
    max_prompt_tokens = (
        max_prompt_tokens if max_input is None else min(max_prompt_tokens, max_input)
    )
    stop_ids = tuple(llm.eos_ids)
    if llm.chat_format is not None:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *llm.chat_format.stop_ids)))
    encode = _article_encoder(llm)
    return SummaryTask(
        list(articles),
        [
            _encode_truncated_article(llm, encode, item.article, max_prompt_tokens)
            for item in articles
        ],
        max_new_tokens,
        stop_ids,
    )


def _article_encoder(llm: Any) -> Callable[[str], list[int]]:
    if llm.chat_format is None:
        return lambda article: list(llm.tokenizer.encode(article + TLDR_SUFFIX))
    return lambda article: list(
        llm.chat_format.encode([{"role": "user", "content": SUMMARY_INSTRUCTION + article}])
    )


def _encode_truncated_article(
    llm: Any, encode: Callable[[str], list[int]], article: str, max_tokens: int
) -> list[int]:
    """Return the prompt's ids, with the article cut until they fit ``max_tokens``."""
    ids = encode(article)
    if len(ids) <= max_tokens:
        return ids
    article_ids = llm.tokenizer.encode(article, bos=False)
    kept = len(article_ids) - (len(ids) - max_tokens)
    while kept > 0:
        ids = encode(llm.tokenizer.decode(article_ids[:kept]))
        if len(ids) <= max_tokens:
            return ids
        kept -= max(len(ids) - max_tokens, 1)
    raise UsageError(
        f"no article fits the {max(max_tokens, 0)} tokens left for a prompt; "
        "lower --max-new-tokens or raise --max-model-len"
    )


def summarize_articles(
    task: SummaryTask,
    side: Summarizer,
    decode: Callable[[list[int]], str],
    *,
    store: SummaryResumeFile,
    facts: RunFingerprint | None = None,
    on_progress: Progress | None = None,
) -> list[Summary]:
    """Return all summaries of one summarizer, in the order of the articles.

    Summaries that are already in ``store`` are not generated again.

    Args:
        task: prompts and limits.
        side: the engine or transformers.
        decode: answer ids to text.
        store: where summaries are saved.
        facts: all else that affects the summaries or their time (``engine_fingerprint``,
            ``reference_fingerprint``); stored summaries with other facts are ignored.
        on_progress: called with (name, summaries done, number of articles).
    """
    key = _summary_cache_key(task, side.name, side.batch, facts or {})
    done = store.read_summaries(key)
    missing = [place for place in range(len(task.articles)) if place not in done]
    for start in range(0, len(missing), side.batch):
        part = missing[start : start + side.batch]
        began = time.perf_counter()
        answers = side.answer_prompts(
            [task.prompts[place] for place in part], task.max_new_tokens, task.eos_ids
        )
        share = (time.perf_counter() - began) / len(part)
        for place, ids in zip(part, answers, strict=True):
            name = task.articles[place].id
            done[place] = Summary(
                name, len(task.prompts[place]), len(ids), decode(ids).strip(), share
            )
        store.append_summaries(key, {place: done[place] for place in part})
        if on_progress is not None:
            on_progress(
                side.name, len(task.articles) - len(missing) + start + len(part), len(task.articles)
            )
    return [done[place] for place in range(len(task.articles))]


def engine_fingerprint(llm: Any) -> RunFingerprint:
    """Return what affects an engine's summaries and their time.

    This is the engine's content, run config, kernels, device and package versions.
    """
    engine_core = llm.engine_core
    facts = {
        "engine": engine_core.artifact.manifest.digest(),
        "run": config_to_dict(engine_core.config),
        "kernels": dict(engine_core.ops.backends),
    }
    return facts | _machine_fingerprint(engine_core.device)


def reference_fingerprint(checkpoint: Checkpoint, dtype: str, device: str) -> RunFingerprint:
    """Return the same facts of transformers; a modified checkpoint has other facts."""
    return {
        "checkpoint": checkpoint.quick_fingerprint(),
        "dtype": dtype,
        **_machine_fingerprint(device),
    }


def _machine_fingerprint(device: str) -> RunFingerprint:
    return {"device": [device, device_name(device)], "versions": versions()}


class SummaryResumeFile:
    """Summaries in a jsonl file, to resume an interrupted run; path None stores nothing.

    A line is a summary with its place in the task and the task's key. An incomplete last line is
    ignored. A file with any other line is rejected, so that nothing is appended to other data.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def check_file(self) -> None:
        """Raise UsageError if the file has anything but stored summaries."""
        if self.path is not None and self.path.exists():
            self._read_rows(self.path)

    def read_summaries(self, key: str) -> dict[int, Summary]:
        """Return the summaries of the key by place. Raises UsageError like ``check_file``."""
        if self.path is None or not self.path.exists():
            return {}
        rows = [row for row in self._read_rows(self.path) if row["key"] == key]
        return {
            row["place"]: Summary(**{name: row[name] for name in _SAVED_SUMMARY_FIELDS})
            for row in rows
            if "place" in row
        }

    def append_summaries(self, key: str, summaries: Mapping[int, Summary]) -> None:
        """Append summaries, by place, in one write; remove an incomplete last line first."""
        if self.path is None:
            return
        rows = ({"key": key, "place": place, **asdict(each)} for place, each in summaries.items())
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(0)
                content = file.read()
                if not content.endswith(b"\n"):
                    file.truncate(content.rfind(b"\n") + 1)
                file.write(lines)
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {error.strerror}; choose another --save"
            ) from None

    def _read_rows(self, path: Path) -> list[dict[str, Any]]:
        try:
            whole, end, torn = read_text(path).rpartition("\n")
            rows = dict(parse_numbered_jsonl(whole + end, path))
            for number, row in rows.items():
                if not _is_valid_row(row):
                    raise UsageError(f"{path}, line {number}: is not a saved summary")
            if not _is_incomplete_line(torn):
                raise UsageError(f"{path}: its last line is not a saved summary")
        except UsageError as error:
            raise UsageError(f"{error}; choose another file for --save") from None
        return list(rows.values())


def _is_valid_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("key"), str)
        and row.keys() >= _SAVED_SUMMARY_FIELDS
    )


def _is_incomplete_line(torn: str) -> bool:
    """Whether the text after the last line end can be the start of a stored summary."""
    try:
        return _is_valid_row(json.loads(torn))
    except ValueError:
        return torn.startswith(_LINE_START) or _LINE_START.startswith(torn)


_SAVED_SUMMARY_FIELDS = frozenset(Summary.__annotations__)
_LINE_START = '{"key": "'


def _summary_cache_key(task: SummaryTask, name: str, batch: int, facts: RunFingerprint) -> str:
    """Hash everything that affects a summary or its time."""
    fields = [name, batch, task.prompts, task.max_new_tokens, task.eos_ids, facts]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def rouge_and_speed(
    summaries: Sequence[Summary], articles: Sequence[Article], rouge: RougeScorer
) -> dict[str, Any]:
    """Return the ROUGE scores and speed of one summarizer as a dict.

    ``rouge`` is {ROUGE type: percent}; the other keys are counts, seconds and rates.
    """
    seconds = sum(each.seconds for each in summaries)
    output = sum(each.output_tokens for each in summaries)
    return {
        "rouge": rouge.mean_score(
            [each.text for each in summaries], [item.highlights for item in articles]
        ),
        "items": len(summaries),
        "prompt_tokens": sum(each.prompt_tokens for each in summaries),
        "output_tokens": output,
        "seconds": seconds,
        "seconds_per_item": seconds / len(summaries),
        "output_tokens_per_s": output / seconds if seconds else 0.0,
    }


def rouge_differences(engine: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return engine minus reference for each ROUGE type, in points."""
    return {
        rouge_type: engine["rouge"][rouge_type] - reference["rouge"][rouge_type]
        for rouge_type in ROUGE_TYPES
    }


def count_equal_texts(left: Sequence[Summary], right: Sequence[Summary]) -> int:
    """Count the summaries with the same text in both lists."""
    return sum(a.text == b.text for a, b in zip(left, right, strict=True))


def summary_text_rows(
    task: SummaryTask, sides: dict[str, Sequence[Summary]]
) -> Iterator[dict[str, Any]]:
    """Yield one dict per article with the texts of all summarizers, for --json."""
    for place, item in enumerate(task.articles):
        yield {"id": item.id, **{name: summaries[place].text for name, summaries in sides.items()}}

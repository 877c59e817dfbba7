"""Prompts, truncation, resuming, and the two sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.core.errors import TokenizerError, UsageError
from modelmill.eval.rouge import Rouge
from modelmill.eval.summarize import (
    TASK,
    TLDR,
    EngineSummarizer,
    HfSummarizer,
    Store,
    differences,
    equal_texts,
    make_task,
    report,
    summarize,
)
from modelmill.eval.texts import Item

ITEMS = [Item("1", "one two three", "one"), Item("2", "four five", "four five"), Item("3", "six", "seven")]


class Letters:
    """A token a character."""

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Chat:
    stop_ids = (3, 4)

    def encode(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        return [1, *(ord(c) for c in messages[0]["content"]), 2]


def fake_llm(room: int = 1000, chat: Any = None, tokenizer: Any = None) -> Any:
    loop = SimpleNamespace(max_model_len=room)
    return SimpleNamespace(loop=loop, tokenizer=tokenizer or Letters(), chat_format=chat, eos_ids=(0, 3))


class Copier:
    """Answers with the first ids of the prompt; counts what it was asked."""

    name = "copier"

    def __init__(self, batch: int = 2) -> None:
        self.batch = batch
        self.asked: list[int] = []

    def answer(self, prompts: Sequence[Sequence[int]], limit: int, eos_ids: Sequence[int]) -> list[list[int]]:
        self.asked.append(len(prompts))
        return [list(p[:limit]) for p in prompts]


def test_prompts_of_a_base_and_a_chat_engine() -> None:
    task = make_task(fake_llm(), ITEMS, 10)
    assert Letters().decode(task.prompts[0]) == "one two three" + TLDR
    assert task.eos_ids == (0, 3)
    task = make_task(fake_llm(chat=Chat()), ITEMS, 10)
    assert Letters().decode(task.prompts[1][1:-1]) == TASK + "four five"
    assert task.eos_ids == (0, 3, 4), "the template's stops end a summary, too"


@pytest.mark.parametrize("chat", [None, Chat()])
def test_articles_are_cut_to_fit(chat: Any) -> None:
    long = Item("l", "abcdefghij" * 50, "x")
    task = make_task(fake_llm(room=150, chat=chat), [long], 20)
    ids = task.prompts[0]
    assert len(ids) == 130
    if chat is None:
        assert Letters().decode(ids).endswith(TLDR), "the end of the prompt must not be cut"
    assert len(make_task(fake_llm(room=500, chat=chat), [long], 20, max_input=90).prompts[0]) == 90
    with pytest.raises(UsageError, match="no article fits"):
        make_task(fake_llm(room=25, chat=chat), [long], 20)


def test_an_ids_only_engine_is_refused() -> None:
    llm = fake_llm()
    llm.tokenizer = None
    with pytest.raises(TokenizerError, match="ids-only"):
        make_task(llm, ITEMS, 10)


def test_a_broken_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    task, path = make_task(fake_llm(), ITEMS, 5), tmp_path / "kept.jsonl"
    decode = Letters().decode
    whole = summarize(task, Copier(), decode, store=Store(path))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    again = Copier()
    assert [each.text for each in summarize(task, again, decode, store=Store(path))] == [each.text for each in whole]
    assert again.asked == [2]
    other = Copier()
    summarize(make_task(fake_llm(), ITEMS, 6), other, decode, store=Store(path))
    assert other.asked == [2, 1], "other settings are other summaries"


def test_report_and_differences() -> None:
    task = make_task(fake_llm(), ITEMS, 9)
    found = summarize(task, Copier(), Letters().decode, store=Store(None))
    told = report(found, ITEMS, Rouge())
    assert told["items"] == 3
    assert told["output_tokens"] == 27
    assert told["rouge"]["rouge1"] > 0
    assert differences(told, told) == dict.fromkeys(told["rouge"], 0.0)
    assert equal_texts(found, found) == 3


def test_both_sides_get_prompts_lengths_and_stops() -> None:
    asked: list[Any] = []

    def generate(prompts: list[Any], params: Any, progress: bool) -> list[Any]:
        asked.append((prompts, params))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 0])]) for _ in prompts]

    assert EngineSummarizer(SimpleNamespace(generate=generate), 4).answer([[1, 2]], 11, (0, 3)) == [[7, 0]]
    prompts, params = asked[0]
    assert prompts == [{"prompt_token_ids": [1, 2]}]
    assert (params.max_tokens, params.stop_token_ids, params.temperature) == (11, (0, 3), 0.0)
    assert params.repetition_penalty == 1.0, "generation_config must not bend a greedy comparison"
    reference = SimpleNamespace(generate=lambda prompts, limit, eos: ([[limit, *eos]], [0.1]))
    assert HfSummarizer(reference, 1).answer([[1, 2]], 11, (0, 3)) == [[11, 0, 3]]

"""Prompts, truncation, resuming, and the two sides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.core.config import RunConfig
from modelmill.core.errors import TokenizerError, UsageError
from modelmill.eval.article_summarization import (
    SUMMARY_INSTRUCTION,
    TLDR_SUFFIX,
    EngineSummarizer,
    HfSummarizer,
    SummaryResumeFile,
    count_equal_texts,
    engine_fingerprint,
    make_summary_task,
    reference_fingerprint,
    rouge_and_speed,
    rouge_differences,
    summarize_articles,
)
from modelmill.eval.datasets import Article
from modelmill.eval.rouge import RougeScorer
from tests.accept.build_and_accept import save_tiny

ITEMS = [
    Article("1", "one two three", "one"),
    Article("2", "four five", "four five"),
    Article("3", "six", "seven"),
]


class Letters:
    """A token a character."""

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Chat:
    stop_ids = (3, 4)

    def encode(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        return [1, *(ord(c) for c in messages[0]["content"]), 2]


def fake_llm(room: int = 1000, chat: Any = None, tokenizer: Any = None) -> Any:
    engine_core = SimpleNamespace(max_model_len=room)
    return SimpleNamespace(
        engine_core=engine_core, tokenizer=tokenizer or Letters(), chat_format=chat, eos_ids=(0, 3)
    )


class Copier:
    """Answers with the first ids of the prompt; counts what it was asked."""

    name = "copier"

    def __init__(self, batch: int = 2) -> None:
        self.batch = batch
        self.num_prompts: list[int] = []

    def answer_prompts(
        self, prompts: Sequence[Sequence[int]], limit: int, eos_ids: Sequence[int]
    ) -> list[list[int]]:
        self.num_prompts.append(len(prompts))
        return [list(p[:limit]) for p in prompts]


def test_prompts_of_a_base_and_a_chat_engine() -> None:
    task = make_summary_task(fake_llm(), ITEMS, 10)
    assert Letters().decode(task.prompts[0]) == "one two three" + TLDR_SUFFIX
    assert task.eos_ids == (0, 3)
    task = make_summary_task(fake_llm(chat=Chat()), ITEMS, 10)
    assert Letters().decode(task.prompts[1][1:-1]) == SUMMARY_INSTRUCTION + "four five"
    assert task.eos_ids == (0, 3, 4), "the template's stops end a summary, too"


@pytest.mark.parametrize("chat", [None, Chat()])
def test_articles_are_cut_to_fit(chat: Any) -> None:
    long = Article("l", "abcdefghij" * 50, "x")
    task = make_summary_task(fake_llm(room=150, chat=chat), [long], 20)
    ids = task.prompts[0]
    assert len(ids) == 130
    if chat is None:
        assert Letters().decode(ids).endswith(TLDR_SUFFIX), "the end of the prompt must not be cut"
    assert (
        len(make_summary_task(fake_llm(room=500, chat=chat), [long], 20, max_input=90).prompts[0])
        == 90
    )
    with pytest.raises(UsageError, match="no article fits"):
        make_summary_task(fake_llm(room=25, chat=chat), [long], 20)


def test_an_ids_only_engine_is_refused() -> None:
    llm = fake_llm()
    llm.tokenizer = None
    with pytest.raises(TokenizerError, match="ids-only"):
        make_summary_task(llm, ITEMS, 10)


def test_a_broken_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    task, path = make_summary_task(fake_llm(), ITEMS, 5), tmp_path / "kept.jsonl"
    decode = Letters().decode
    summaries = summarize_articles(task, Copier(), decode, store=SummaryResumeFile(path))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    again = Copier()
    assert [
        each.text for each in summarize_articles(task, again, decode, store=SummaryResumeFile(path))
    ] == [each.text for each in summaries]
    assert again.num_prompts == [2]
    other = Copier()
    summarize_articles(
        make_summary_task(fake_llm(), ITEMS, 6), other, decode, store=SummaryResumeFile(path)
    )
    assert other.num_prompts == [2, 1], "other settings are other summaries"


def test_articles_of_one_id_keep_their_own_summaries(tmp_path: Path) -> None:
    items = [Article("2", "one two", "x"), Article("2", "three", "y")]
    task, decode, path = (
        make_summary_task(fake_llm(), items, 5),
        Letters().decode,
        tmp_path / "kept.jsonl",
    )
    for _ in range(2):  # made, and kept
        summaries = summarize_articles(task, Copier(), decode, store=SummaryResumeFile(path))
        assert [each.text for each in summaries] == ["one t", "three"]
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    again = Copier()
    assert [
        each.text for each in summarize_articles(task, again, decode, store=SummaryResumeFile(path))
    ] == [
        "one t",
        "three",
    ]
    assert again.num_prompts == [1]


class Manifest:
    def __init__(self, digest: str) -> None:
        self.digest = lambda: digest


def facts_of(
    digest: str = "d", device: str = "cpu", ops: str = "torch", **run: Any
) -> dict[str, Any]:
    artifact = SimpleNamespace(manifest=Manifest(digest))
    engine_core = SimpleNamespace(artifact=artifact, config=RunConfig(**run), device=device)
    engine_core.ops = SimpleNamespace(backends={"linear": ops})
    return engine_fingerprint(SimpleNamespace(engine_core=engine_core))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "e"},
        {"device": "cuda:0"},
        {"ops": "cpu"},
        {"kv_cache_dtype": "fp8"},
        {"kernels": {"linear": "torch"}},
        {"tp": 2},
        {"threads": 1},
        {"max_num_seqs": 4},
    ],
)
def test_an_engine_that_is_run_otherwise_makes_its_own_summaries(
    change: dict[str, Any], tmp_path: Path
) -> None:
    task, decode, store = (
        make_summary_task(fake_llm(), ITEMS, 5),
        Letters().decode,
        SummaryResumeFile(tmp_path / "kept.jsonl"),
    )
    for facts, num_prompts in (
        (facts_of(), [2, 1]),
        (facts_of(), []),
        (facts_of(**change), [2, 1]),
    ):
        side = Copier()
        summarize_articles(task, side, decode, store=store, facts=facts)
        assert side.num_prompts == num_prompts


def test_another_reference_is_another_side(tmp_path: Path) -> None:
    from modelmill.checkpoint.open import open_checkpoint

    one, other = (open_checkpoint(save_tiny("llama", tmp_path / name)) for name in ("one", "other"))
    facts = reference_fingerprint(one, "float32", "cpu")
    assert facts == reference_fingerprint(one, "float32", "cpu")
    assert facts != reference_fingerprint(one, "bfloat16", "cpu")
    assert facts != reference_fingerprint(other, "float32", "cpu"), (
        "files of another time are another checkpoint"
    )


@pytest.mark.parametrize("at", [1, 9, 60, -1])
def test_a_line_that_was_cut_off_is_made_again(at: int, tmp_path: Path) -> None:
    task, decode, path = (
        make_summary_task(fake_llm(), ITEMS, 5),
        Letters().decode,
        tmp_path / "kept.jsonl",
    )
    summaries = summarize_articles(task, Copier(), decode, store=SummaryResumeFile(path))
    lines = path.read_text().splitlines(keepends=True)
    for num_lines in (0, 2):  # behind no line, and behind two
        path.write_text("".join(lines[:num_lines]) + lines[num_lines][:at])
        SummaryResumeFile(path).check_file()
        again = Copier()
        assert [
            each.text
            for each in summarize_articles(task, again, decode, store=SummaryResumeFile(path))
        ] == [e.text for e in summaries]
        assert sum(again.num_prompts) == 3 - num_lines
        assert sorted(path.read_text().splitlines(keepends=True)[:num_lines]) == sorted(
            lines[:num_lines]
        )
        assert [json.loads(line)["place"] for line in path.read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        '{"article": "a", "highlights": "b"}\n',
        '{"article": "a", "highlights": "b"}',
        '{"key": "a", "value": 3}\n',
        '{"key": "a", "value": 3}',
        "# Notes",
        "# Notes\n",
        "3\n",
        "3",
    ],
)
def test_a_file_of_another_kind_is_refused_and_not_touched(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    for act in (
        SummaryResumeFile(path).check_file,
        lambda: SummaryResumeFile(path).read_summaries("k"),
    ):
        with pytest.raises(
            UsageError, match=r"other\.jsonl.*is no.*; choose another file for --save"
        ) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert path.read_text() == content


def test_report_and_differences() -> None:
    task = make_summary_task(fake_llm(), ITEMS, 9)
    summaries = summarize_articles(task, Copier(), Letters().decode, store=SummaryResumeFile(None))
    report = rouge_and_speed(summaries, ITEMS, RougeScorer())
    assert report["items"] == 3
    assert report["output_tokens"] == 27
    assert report["rouge"]["rouge1"] > 0
    assert rouge_differences(report, report) == dict.fromkeys(report["rouge"], 0.0)
    assert count_equal_texts(summaries, summaries) == 3


def test_both_sides_get_prompts_lengths_and_stops() -> None:
    calls: list[Any] = []

    def generate(prompts: list[Any], params: Any, progress: bool) -> list[Any]:
        calls.append((prompts, params))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 0])]) for _ in prompts]

    assert EngineSummarizer(SimpleNamespace(generate=generate), 4).answer_prompts(
        [[1, 2]], 11, (0, 3)
    ) == [[7, 0]]
    prompts, params = calls[0]
    assert prompts == [{"prompt_token_ids": [1, 2]}]
    assert (params.max_tokens, params.stop_token_ids, params.temperature) == (11, (0, 3), 0.0)
    assert params.repetition_penalty == 1.0, "generation_config must not bend a greedy comparison"
    reference = SimpleNamespace(generate=lambda prompts, limit, eos: ([[limit, *eos]], [0.1]))
    assert HfSummarizer(reference, 1).answer_prompts([[1, 2]], 11, (0, 3)) == [[11, 0, 3]]

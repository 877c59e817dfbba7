"""Data sets and traces of lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelmill.core.errors import UsageError
from modelmill.eval.datasets import (
    random_requests,
    read_articles,
    read_bench_requests,
    read_numbered_jsonl,
    sample_request_lengths,
)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_the_trace_is_selected_by_the_published_rule(shared: Path) -> None:
    lengths = sample_request_lengths(shared / "data/text/azure_conversation_trace.csv", 500)
    assert len(lengths) == 500
    assert sum(prompt for prompt, _ in lengths) == 428_293
    assert sum(output for _, output in lengths) == 109_147


def test_trace_limits(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\nx,3,5\nx,4,1\nx,100,0\nx,60,40\nx,60,41\n"
    )
    assert sorted(sample_request_lengths(path, 10, limit=100)) == [(4, 1), (60, 40)]
    path.write_text("ContextTokens,GeneratedTokens\n5,many\n")
    with pytest.raises(UsageError, match="line 2"):
        sample_request_lengths(path, 10)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no columns"):
        sample_request_lengths(path, 10)


def test_sharegpt(tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "x" * 50}, {"from": "gpt", "value": "y"}]},
        {"conversations": [{"from": "human", "value": "last"}]},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(talks))
    requests = read_bench_requests(path, None, encode, 20, 7)
    assert [(bytes(w.prompt), w.output) for w in requests] == [(b"hello", 2), (b"last", 7)]
    assert len(read_bench_requests(path, 1, encode, 20, 7)) == 1


def test_jsonl_forms(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "abc"},
        {"text": "t", "output_len": 3},
        {"messages": [{"role": "user", "content": "m"}, {"role": "assistant", "content": "nn"}]},
        {"article": "a", "highlights": "hhhh"},
        {"turns": ["first", "second"]},
        {"other": 1},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    requests = read_bench_requests(path, None, encode, 100, 9)
    assert [(bytes(w.prompt).decode(), w.output) for w in requests] == [
        ("p", 3), ("t", 3), ("m", 2), ("a", 4), ("first", 9),
    ]  # fmt: skip


@pytest.mark.parametrize("content", ["{", "[1]\n", "\xff"])
def test_broken_lines_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        list(read_numbered_jsonl(path))
    assert str(path) in str(caught.value)


def test_articles(shared: Path, tmp_path: Path) -> None:
    items = read_articles(shared / "data/text/cnndm_eval.jsonl", 3)
    assert len(items) == 3
    assert all(item.article and item.highlights for item in items)
    path = tmp_path / "a.jsonl"
    path.write_text('{"article": "a"}\n')
    with pytest.raises(UsageError, match="highlights"):
        read_articles(path, None)
    with pytest.raises(UsageError, match="cannot read"):
        read_articles(tmp_path / "none.jsonl", None)


def test_random_work_is_seeded() -> None:
    lengths = [(3, 2), (5, 1)]
    assert random_requests(lengths, 100, 1) == random_requests(lengths, 100, 1)
    assert random_requests(lengths, 100, 1) != random_requests(lengths, 100, 2)
    assert [(len(w.prompt), w.output) for w in random_requests(lengths, 100, 1)] == lengths
    assert all(0 <= id < 3 for w in random_requests(lengths, 3, 1) for id in w.prompt)

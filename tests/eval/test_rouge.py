"""Sentences, and ROUGE values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.eval.rouge import RougeScorer, split_sentences


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It rains. It pours.", ["It rains.", "It pours."]),
        ("Mr. Smith met Dr. Jones in the U.S. Senate. They talked.", 2),
        ("He said 'stop .' Then he left .", 2),
        ("The match ended 0-0 . Burnley won nothing .", 2),
        ("It cost 3.14 dollars. 42 people paid.", 2),
        ("J. K. Rowling wrote it! Did you read it? Yes.", 3),
        ("One line\nAnother line", ["One line", "Another line"]),
        ("e.g. this and i.e. that", 1),
        ("", 0),
    ],
)
def test_sentences(text: str, parts: int | list[str]) -> None:
    actual = split_sentences(text)
    assert (actual if isinstance(parts, list) else len(actual)) == parts


@settings(deadline=None)
@given(st.text(alphabet="ab .!?\n'\"A", max_size=80))
def test_sentences_lose_nothing_but_space(text: str) -> None:
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_values_by_hand() -> None:
    # unigrams 2 of 3 and 2 of 4 shared: P 2/3, R 2/4, F 4/7; bigrams 1 of 2 and 1 of 3: F 2/5
    score = RougeScorer().score("the cat slept", "the cat sat down")
    assert score["rouge1"] == pytest.approx(100 * 4 / 7)
    assert score["rouge2"] == pytest.approx(100 * 2 / 5)
    assert score["rougeL"] == pytest.approx(100 * 4 / 7)
    assert score["rougeLsum"] == pytest.approx(100 * 4 / 7)


def test_lsum_takes_sentences_in_any_order() -> None:
    score = RougeScorer().score("It pours. The cat sleeps.", "The cat sleeps. It pours.")
    assert score["rougeLsum"] == pytest.approx(100.0)
    assert score["rougeL"] == pytest.approx(60.0)


def test_mean() -> None:
    rouge = RougeScorer()
    assert rouge.mean_score(["a cat", "x"], ["a cat", "y"])["rouge1"] == pytest.approx(50.0)
    with pytest.raises(ValueError):
        rouge.mean_score(["a"], ["a", "b"])

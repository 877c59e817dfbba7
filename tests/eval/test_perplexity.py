"""Windows and the mean over them, against a plain loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import UsageError
from modelmill.eval.perplexity import measure_perplexity, sliding_windows


class Bigram:
    """Scores by a seeded table of log probabilities: log p(b | a)."""

    def __init__(self, vocab: int) -> None:
        self.table = (
            torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(1))
            .log_softmax(-1)
            .tolist()
        )

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        for ids in windows:
            yield [self.table[a][b] for a, b in itertools.pairwise(ids)]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 20))
def test_every_token_is_scored_once_but_those_without_context(
    count: int, length: int, stride: int
) -> None:
    if stride > length:
        with pytest.raises(UsageError, match="--stride"):
            sliding_windows(count, length, stride)
        return
    try:
        windows = sliding_windows(count, length, stride)
    except UsageError:
        assert count < 2
        return
    scored = [place for w in windows for place in range(w.end - w.scored, w.end)]
    assert len(scored) == len(set(scored))
    missing = set(range(count)) - set(scored)
    if stride < length:
        # the first token of the text alone has nothing before it
        assert missing == {0}
    else:
        assert missing == set(range(0, count, length))
    for window in windows:
        assert 2 <= window.end - window.begin <= length
        assert window.scored < window.end - window.begin


def test_windows_are_those_of_the_usual_recipe() -> None:
    # transformers' documentation: begin every stride, labels before the previous end masked
    count, length, stride = 100, 32, 12
    expected, previous = [], 0
    for begin in range(0, count, stride):
        end = min(begin + length, count)
        expected.append((begin, end, end - previous - (1 if begin == previous else 0)))
        previous = end
        if end == count:
            break
    assert [(w.begin, w.end, w.scored) for w in sliding_windows(count, length, stride)] == expected


def test_mean_over_scored_tokens() -> None:
    ids = torch.randint(0, 7, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    model = Bigram(7)
    result = measure_perplexity(ids, model, max_length=10, stride=10)
    losses = [-model.table[a][b] for i, (a, b) in enumerate(itertools.pairwise(ids), 1) if i % 10]
    assert result.tokens == len(losses) == 45
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-12)
    # one token of context is all that a bigram needs: the windows do not matter
    assert measure_perplexity(ids, model, max_length=20, stride=7).tokens == 49


def test_progress_is_reported() -> None:
    updates: list[tuple[str, int, int]] = []
    measure_perplexity(
        [1, 2, 3, 4],
        Bigram(7),
        max_length=2,
        stride=2,
        on_progress=lambda *each: updates.append(each),
    )
    assert updates == [("perplexity", 1, 2), ("perplexity", 2, 2)]


@pytest.mark.parametrize(
    ("count", "length", "stride"), [(5, 1, 1), (5, 4, 0), (1, 4, 4), (0, 4, 4)]
)
def test_senseless_sizes_are_refused_in_one_line(count: int, length: int, stride: int) -> None:
    with pytest.raises(UsageError) as caught:
        sliding_windows(count, length, stride)
    assert "\n" not in str(caught.value)

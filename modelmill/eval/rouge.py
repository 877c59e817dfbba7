"""ROUGE-1, -2, -L and -Lsum of summaries in percent, by Google's rouge-score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from modelmill.core.errors import MissingDependency
from modelmill.core.packages import install_command

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

TITLES = (
    "mr",
    "mrs",
    "ms",
    "dr",
    "prof",
    "sen",
    "rep",
    "gov",
    "gen",
    "col",
    "sgt",
    "lt",
    "capt",
    "st",
    "jr",
    "sr",
)
COMMON_ABBREVIATIONS = (
    "vs",
    "no",
    "inc",
    "ltd",
    "co",
    "corp",
    "dept",
    "est",
    "fig",
    "u.s",
    "u.k",
    "u.n",
    "e.g",
    "i.e",
    "a.m",
    "p.m",
)
MONTHS = ("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sept", "sep", "oct", "nov", "dec")
ABBREVIATIONS = frozenset((*TITLES, *COMMON_ABBREVIATIONS, *MONTHS))
_SENTENCE_END_PATTERN = re.compile(r"([.!?]+[\"'”’)\]]*)\s+")


def split_sentences(text: str) -> list[str]:
    """Split at line ends and at . ! or ? with closing quotes, except after abbreviations.

    Also splits at a full stop after a space ("it is over . The next"), as in news text.
    """
    sentences: list[str] = []
    for line in text.split("\n"):
        start = 0
        for end in _SENTENCE_END_PATTERN.finditer(line):
            if end.end() < len(line) and _ends_sentence(line, start, end):
                sentences.append(line[start : end.end()])
                start = end.end()
        sentences.append(line[start:])
    return [" ".join(part.split()) for part in sentences if part.strip()]


def _ends_sentence(line: str, start: int, end: re.Match[str]) -> bool:
    """Whether the mark ends a sentence.

    It does not after an abbreviation or an initial, nor before a lower-case letter.
    """
    after = line[end.end()]
    if after.islower():
        return False
    if end.group(1) != ".":
        return True
    words = line[start : end.start()].split()
    attached = end.start() > start and not line[end.start() - 1].isspace()
    if not words or not attached:
        return True
    last = words[-1].strip("\"'“‘([").lower()
    return last not in ABBREVIATIONS and not (len(last) == 1 and last.isalpha() and last != "i")


class RougeScorer:
    """Scores a summary against its reference: F-measures with stemming, times 100."""

    def __init__(self) -> None:
        try:
            from rouge_score import rouge_scorer
        except ImportError:
            raise MissingDependency(
                f"ROUGE needs rouge-score; install it with: {install_command('eval')}"
            ) from None
        self._scorer: Any = rouge_scorer.RougeScorer(list(ROUGE_TYPES), use_stemmer=True)

    def score(self, summary: str, reference: str) -> dict[str, float]:
        """Return the F-measures × 100 of one pair."""
        scores = self._scorer.score(
            "\n".join(split_sentences(reference)), "\n".join(split_sentences(summary))
        )
        return {
            rouge_type: 100.0 * float(scores[rouge_type].fmeasure) for rouge_type in ROUGE_TYPES
        }

    def mean_score(self, summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return the mean over all pairs, of which there is at least one."""
        pair_scores = [self.score(*pair) for pair in zip(summaries, references, strict=True)]
        return {
            rouge_type: sum(score[rouge_type] for score in pair_scores) / len(pair_scores)
            for rouge_type in ROUGE_TYPES
        }

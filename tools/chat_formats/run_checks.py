"""One run of the checks of a chat format: seeds in order, counted in CPU time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from modelmill.text.chat_format_registry import load_chat_syntax
from tools.chat_formats.check_answers import check_answer

CHUNK = 1000
"""Answers between two reports of the progress."""
MAX_FAILURES = 10
"""After so many failures a format is not checked any further."""


@dataclass
class FormatRun:
    """What was checked of one format.

    Attributes:
        name: of the format.
        first_seed: of the first answer.
        checked: answers so far.
        cpu_seconds: they took.
        failures: seed and text of each that failed.
    """

    name: str
    first_seed: int = 0
    checked: int = 0
    cpu_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_format(run: FormatRun, count: int) -> Iterator[None]:
    """Check answers until there are ``count``; yields after every CHUNK of them."""
    syntax = load_chat_syntax(run.name)
    while not is_complete(run, count):
        start = time.process_time()
        for seed in range(run.first_seed + run.checked, _end_of_chunk(run, count)):
            try:
                check_answer(syntax, random.Random(f"{run.name} {seed}"))
            except AssertionError as error:
                run.failures.append(f"seed {seed}: {error}")
            run.checked += 1
        run.cpu_seconds += time.process_time() - start
        yield


def is_complete(run: FormatRun, count: int) -> bool:
    """Whether a format is checked no further."""
    return run.checked >= count or len(run.failures) >= MAX_FAILURES


def _end_of_chunk(run: FormatRun, count: int) -> int:
    return run.first_seed + min(run.checked + CHUNK, count)

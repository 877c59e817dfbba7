"""Counts right answers of an engine to simple questions, by how its tokens are chosen.

    python benchmarks/sampling_defaults.py ENGINE [--save FILE.jsonl]

Each question of ``QUESTIONS``, simple facts, is asked with three seeds; an answer is right if it
has one of the question's words. It says which defaults suit a small model
(modelmill/core/generation_defaults.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.append_rows import portable_command  # noqa: E402
from modelmill.eval.report import append_rows, device_name, make_row  # noqa: E402

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "What is the capital of France?": ("Paris",),
    "What is the capital of Italy?": ("Rome",),
    "What is the capital of Spain?": ("Madrid",),
    "What is the capital of Germany?": ("Berlin",),
    "What is the capital of Japan?": ("Tokyo",),
    "What is the capital of China?": ("Beijing",),
    "What is the capital of Russia?": ("Moscow",),
    "What is the capital of Egypt?": ("Cairo",),
    "What is the capital of England?": ("London",),
    "What is the capital of Greece?": ("Athens",),
    "What is the capital of Austria?": ("Vienna",),
    "What is the capital of Portugal?": ("Lisbon",),
    "What is the capital of Ireland?": ("Dublin",),
    "What is the capital of Sweden?": ("Stockholm",),
    "What is the capital of Norway?": ("Oslo",),
    "What is the capital of Poland?": ("Warsaw",),
    "What is the capital of Hungary?": ("Budapest",),
    "What is the capital of Canada?": ("Ottawa",),
    "What is the largest planet of the solar system?": ("Jupiter",),
    "Which planet is closest to the sun?": ("Mercury",),
    "Which ocean is the largest?": ("Pacific",),
    "Who wrote Romeo and Juliet?": ("Shakespeare",),
    "How many days does a week have?": ("7", "seven", "Seven"),
    "What do bees make?": ("honey", "Honey"),
}
SEEDS = (1, 2, 3)
MAX_TOKENS = 32
_FILTERS = {"top_p": 0.95, "top_k": 40, "min_p": 0.05}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "temperature 1": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    "temperature 0.8, top_p 0.95, top_k 40, min_p 0.05": {"temperature": 0.8, **_FILTERS},
    "temperature 0.6, top_p 0.95, top_k 40, min_p 0.05": {"temperature": 0.6, **_FILTERS},
    "greedy": {"temperature": 0.0},
}


def is_right(answer: str, words: Sequence[str]) -> bool:
    """Whether an answer has one of the words."""
    return any(word in answer for word in words)


def count_right(llm: Any, setting: Mapping[str, Any]) -> int:
    """Right answers to all questions, each with every seed, in one batch."""
    from modelmill import SamplingParams

    requests = [(question, seed) for question in QUESTIONS for seed in SEEDS]
    answers = llm.chat(
        [[{"role": "user", "content": question}] for question, _ in requests],
        [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **setting) for _, seed in requests],
        progress=False,
    )
    return sum(
        is_right(answer.outputs[0].text, QUESTIONS[question])
        for (question, _), answer in zip(requests, answers, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each setting, and save rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", type=Path, help="with a chat template")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl")
    options = parser.parse_args(arguments)

    from modelmill import LLM

    total = len(QUESTIONS) * len(SEEDS)
    command = portable_command("sampling_defaults", arguments or sys.argv[1:])
    with LLM(options.engine) as llm:
        device = device_name(str(llm.engine_core.device))
        for name, setting in SETTINGS.items():
            right = count_right(llm, setting)
            print(f"{name}: {right} of {total}", flush=True)
            if options.save:
                row = make_row(
                    command, "right_answers", right, "answers", device, bench="sampling_defaults",
                    setting=name, total=total, engine=options.engine.name,
                )  # fmt: skip
                append_rows(options.save, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""lm-eval: the same scores through the server as with transformers, of the same weights in float32.

Two tasks over local jsonl, made at run time from a text beside the checkout: 100 times the right
one of four endings
of a sentence (log-likelihoods), and 100 times how a sentence goes on (greedy answers).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = "lm-eval's local-completions: the scores of transformers on 100 items"
PACKAGE = "lm_eval"
ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.parent / "shared" / "data" / "text" / "wikitext2_test_a.txt"
ITEMS = 100
MAX_DIFFERENCE = 2e-3
"""Most that a log-likelihood may differ by: sums of some 20 float32 terms in another order."""
LOCAL_DATA = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
doc_to_text: context
"""
CHOICE_TASK = """task: modelmill_endings
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
GENERATION_TASK = """task: modelmill_goes_on
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - metric: exact_match
"""
TASKS = ("modelmill_endings", "modelmill_goes_on")


def items(text: str, count: int = ITEMS, seed: int = 1) -> list[dict[str, Any]]:
    """Make an item {"context", "choices", "label"}: half a sentence and four endings."""
    drawn = random.Random(seed)
    sentences = [sentence.strip() for sentence in re.split(r" \. |\n", text)]
    halves = [each.split() for each in sentences if 16 <= len(each.split()) <= 32]
    pairs = [
        (" ".join(words[: len(words) // 2]), " " + " ".join(words[len(words) // 2 :]))
        for words in halves
    ]
    drawn.shuffle(pairs)
    sentence = []
    for place in range(count):
        context, expected = pairs[place]
        others = [pairs[count + 3 * place + k][1] for k in range(3)]
        label = drawn.randrange(4)
        sentence.append(
            {
                "context": context,
                "choices": [*others[:label], expected, *others[label:]],
                "label": label,
            }
        )
    return sentence


def run(base_url: str, model: str, out: Path) -> SuiteResult:
    """Both ways, item by item."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    if not TEXT.is_file():
        return SuiteResult(
            0, excluded=[FailedCheck("100 items", f"needs {TEXT.name} in the shared data folder")]
        )
    reference, tokenizer = _reference(out)
    manager = _tasks(out)
    options: dict[str, Any] = {
        "tasks": list(TASKS),
        "task_manager": manager,
        "bootstrap_iters": 0,
        "log_samples": True,
    }
    here = HFLM(pretrained=reference, tokenizer=tokenizer, batch_size=16, max_length=2048)
    expected = simple_evaluate(here, **options)
    there = LocalCompletionsAPI(
        base_url=f"{base_url}/completions", model=model, tokenizer=str(out / "tokenizer"),
        max_length=2048,
        tokenizer_backend="huggingface", num_concurrent=4, batch_size=1,
    )  # fmt: skip
    return compare_results(expected, simple_evaluate(there, **options))


def _reference(out: Path) -> tuple[Any, Any]:
    """Load the GGUF file with transformers in float32; its tokenizer is saved in ``out``, too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from modelmill.checkpoint.pull import pull
    from tools.conformance.server import MODEL

    path = pull(MODEL, ROOT / "out" / "models")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(out / "tokenizer")
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return loaded.eval(), tokenizer


def _tasks(out: Path) -> Any:
    from lm_eval.tasks import TaskManager

    folder = out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "items.jsonl"
    data.write_text(
        "".join(json.dumps(each) + "\n" for each in items(TEXT.read_text("utf-8"))), "utf-8"
    )
    for name, text in zip(TASKS, (CHOICE_TASK, GENERATION_TASK), strict=True):
        (folder / f"{name}.yaml").write_text(text + LOCAL_DATA.format(path=data), "utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def compare_results(expected: dict[str, Any], served: dict[str, Any]) -> SuiteResult:
    """Scores, every log-likelihood and every answer."""
    result = SuiteResult(0)
    for task in TASKS:
        for metric in sorted(
            key
            for key in expected["results"][task]
            if key.endswith(",none") and "stderr" not in key
        ):
            actual, reference = served["results"][task][metric], expected["results"][task][metric]
            name = f"{task}: {metric.removesuffix(',none')}"
            result.facts[name] = f"{actual:g} through the server, {reference:g} with transformers"
            _collect(
                result, name, None if actual == reference else f"{actual:g}, not {reference:g}"
            )
    worst, greedy = _likelihood_difference(
        expected["samples"][TASKS[0]], served["samples"][TASKS[0]]
    )
    result.facts["largest difference of a log-likelihood"] = f"{worst:.1e} of {4 * ITEMS}"
    _collect(
        result,
        "every log-likelihood",
        None if worst <= MAX_DIFFERENCE else f"off by {worst:.1e}, {MAX_DIFFERENCE:g} is allowed",
    )
    _collect(
        result, "what greedy decoding would have said", None if greedy == 0 else f"{greedy} differ"
    )
    texts = [
        [sample["resps"][0][0] for sample in _sorted(side["samples"][TASKS[1]])]
        for side in (expected, served)
    ]
    unlike = sum(a != b for a, b in zip(*texts, strict=True))
    result.facts["equal greedy answers of 12 tokens"] = (
        f"{len(texts[0]) - unlike} of {len(texts[0])}"
    )
    _collect(
        result,
        "every greedy answer",
        None if unlike == 0 else f"{unlike} of {len(texts[0])} differ",
    )
    return result


def _likelihood_difference(expected: Sequence[Any], served: Sequence[Any]) -> tuple[float, int]:
    """Return the largest difference, and how often only one side calls the ending greedy."""
    worst, greedy = 0.0, 0
    for left, right in zip(_sorted(expected), _sorted(served), strict=True):
        for (a,), (b,) in zip(left["resps"], right["resps"], strict=True):
            worst = max(worst, abs(float(a[0]) - float(b[0])))
            greedy += str(a[1]) != str(b[1])
    return worst, greedy


def _sorted(samples: Sequence[Any]) -> list[Any]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def _collect(result: SuiteResult, name: str, problem: str | None) -> None:
    if problem is None:
        result.passed += 1
    else:
        result.failed.append(FailedCheck(name, problem))

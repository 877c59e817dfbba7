"""``modelmill summarize``: ROUGE of summaries of an engine and of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.evaluation_options import (
    EvaluationArgs,
    load_transformers_reference,
    open_evaluated_engine,
    require_transformers_for_reference,
)
from modelmill.cli.output import print_json, print_table, show_progress
from modelmill.core.config import option_field, path_option_field
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.eval.article_summarization import (
        RunFingerprint,
        Summarizer,
        Summary,
        SummaryTask,
    )
    from modelmill.llm import LLM

HELP = (
    "Summarize articles and score the summaries with ROUGE, beside transformers on the same "
    "prompts."
)
EPILOG = """Greedy. A chat engine gets the task through its chat template, others by "TL;DR:" behind the article.

Examples:

  modelmill summarize model.engine --data articles.jsonl --num 20

  modelmill summarize model.engine --data articles.jsonl --reference model.gguf --check-accuracy 0.5"""  # noqa: E501

DEFAULT_ENGINE_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Args(EvaluationArgs):
    """Command-line options of ``modelmill summarize``."""

    data: Path | None = option_field(
        None, "jsonl with article and highlights", required=True, metavar="FILE.jsonl"
    )
    num: int | None = option_field(None, "take only this many articles")
    max_new_tokens: int = option_field(100, "longest summary in tokens")
    max_input_tokens: int | None = option_field(
        None, "cut prompts to this many tokens (default: what the engine reads)"
    )
    batch_size: int | None = option_field(
        None,
        f"summaries made at once (default: {DEFAULT_ENGINE_BATCH_SIZE} by the engine, "
        "1 by transformers, which then pads nothing)",
    )
    check_accuracy: float | None = option_field(
        None, "exit code 1 where any ROUGE differs from the reference's by more than this many "
        "points",
        metavar="THRESHOLD",
    )  # fmt: skip
    save: Path | None = path_option_field(
        "keep the summaries here; a broken run goes on from it", "FILE.jsonl"
    )
    texts: bool = option_field(False, "show the summaries, too", flags=("--texts",))


def run(args: Args) -> int:
    """Summarize with the engine and the reference, score, and check the threshold if given."""
    from modelmill.eval.article_summarization import (
        EngineSummarizer,
        HfSummarizer,
        SummaryResumeFile,
        engine_fingerprint,
        make_summary_task,
        reference_fingerprint,
    )
    from modelmill.eval.datasets import read_articles
    from modelmill.eval.rouge import RougeScorer

    if args.check_accuracy is not None and args.reference is None:
        raise UsageError("--check-accuracy needs --reference CHECKPOINT to compare with")
    require_transformers_for_reference(args)
    if (args.num is not None and args.num < 1) or (
        args.batch_size is not None and args.batch_size < 1
    ):
        raise UsageError("--num and --batch-size must be at least 1")
    for name in ("max_new_tokens", "max_input_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    assert args.data is not None
    rouge, items = RougeScorer(), read_articles(args.data, args.num)
    SummaryResumeFile(args.save).check_file()
    llm = open_evaluated_engine(args)
    task = make_summary_task(llm, items, args.max_new_tokens, args.max_input_tokens)
    sides: dict[str, list[Summary]] = {}
    batches = {
        "engine": min(args.batch_size or DEFAULT_ENGINE_BATCH_SIZE, len(items)),
        "reference": min(args.batch_size or 1, len(items)),
    }
    sides["modelmill"] = _summarize_side(
        args, llm, task, EngineSummarizer(llm, batches["engine"]), engine_fingerprint(llm)
    )
    if args.reference is not None:
        checkpoint, reference = load_transformers_reference(args, llm.engine_core.device)
        reference_summarizer = HfSummarizer(
            reference, batches["reference"], f"transformers {args.reference_dtype}"
        )
        facts = reference_fingerprint(checkpoint, args.reference_dtype, llm.engine_core.device)
        sides["transformers"] = _summarize_side(args, llm, task, reference_summarizer, facts)
    result = _make_rouge_result(args, task, sides, rouge, batches)
    print_json(result) if args.json else _show_scores(result)
    return 0 if result.get("passed", True) else 1


def _summarize_side(
    args: Args, llm: LLM, task: SummaryTask, side: Summarizer, facts: RunFingerprint
) -> list[Summary]:
    from modelmill.eval.article_summarization import SummaryResumeFile, summarize_articles

    tokenizer = llm.tokenizer
    assert tokenizer is not None
    with show_progress(side.name, quiet=args.json) as on_progress:
        store = SummaryResumeFile(args.save)
        return summarize_articles(
            task,
            side,
            lambda ids: tokenizer.decode(ids),
            store=store,
            facts=facts,
            on_progress=on_progress,
        )


def _make_rouge_result(
    args: Args,
    task: SummaryTask,
    sides: dict[str, list[Summary]],
    rouge: Any,
    batches: dict[str, int],
) -> dict[str, Any]:
    from modelmill.eval.article_summarization import (
        count_equal_texts,
        rouge_and_speed,
        rouge_differences,
        summary_text_rows,
    )

    result: dict[str, Any] = {"engine": rouge_and_speed(sides["modelmill"], task.articles, rouge)}
    result["engine"]["batch_size"] = batches["engine"]
    if "transformers" in sides:
        reference = rouge_and_speed(sides["transformers"], task.articles, rouge)
        change = rouge_differences(result["engine"], reference)
        result |= {"reference": {**reference, "dtype": args.reference_dtype}, "difference": change}
        result["reference"]["batch_size"] = batches["reference"]
        result["equal_summaries"] = count_equal_texts(sides["modelmill"], sides["transformers"])
        result["speedup"] = (
            reference["seconds"] / result["engine"]["seconds"]
            if result["engine"]["seconds"]
            else None
        )
        if args.check_accuracy is not None:
            result["threshold"] = args.check_accuracy
            result["passed"] = max(map(abs, change.values())) <= args.check_accuracy
    if args.texts:
        result["summaries"] = list(summary_text_rows(task, dict(sides)))
    return result


def _show_scores(result: dict[str, Any]) -> None:
    for each in result.get("summaries", []):
        print(f"── {each.pop('id')}")
        for name, text in each.items():
            print(f"{name}: {text}\n")
    metrics = list(result["engine"]["rouge"])
    rows = []
    for name, key in (("modelmill", "engine"), ("transformers", "reference")):
        if key in result:
            side = result[key]
            speed = [side["seconds_per_item"], side["output_tokens_per_s"], side["items"]]
            rows.append([name, *[f"{side['rouge'][metric]:.2f}" for metric in metrics], *speed])
    if "difference" in result:
        rows.append(
            [
                "difference",
                *[f"{result['difference'][metric]:+.2f}" for metric in metrics],
                None,
                None,
                None,
            ]
        )
    print_table(("", *metrics, "s per item", "output tokens/s", "items"), rows)
    if "speedup" in result:
        equal = f"{result['equal_summaries']} of {result['engine']['items']} summaries are equal"
        ours, reference_batch = (result[side]["batch_size"] for side in ("engine", "reference"))
        print(
            f"{equal}; speed-up over transformers {result['speedup']:.2f}×, {ours} at once "
            f"against {reference_batch}"
        )
    if "passed" in result:
        verdict = "within" if result["passed"] else "NOT within"
        print(f"{verdict} {result['threshold']} points of the reference")

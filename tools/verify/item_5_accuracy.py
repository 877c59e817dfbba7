"""Perplexity on WikiText-2 and ROUGE on CNN/DailyMail, beside transformers in the same dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from modelmill.eval.article_summarization import Answers, Ids, Summarizer
from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "Perplexity within 0.1 % and ROUGE within 0.5 (float32) or 1 (bfloat16) of transformers"
LIMIT, WINDOW = 16384, 1024
PROMPT, ANSWER, BATCH = 960, 64, 10
ROUGE = {"float32": 0.5, "bfloat16": 1.0}


def run(context: VerifyContext) -> VerifyResult:
    """The text first, then the articles in both dtypes."""
    rows = [_perplexity(context)]
    for dtype, bound in ROUGE.items():
        rows += _rouge(context, dtype, bound)
    notes = [
        f"Perplexity: the first {LIMIT} tokens of wikitext2_test_a.txt, tokenized once, windows "
        f"of {WINDOW} that do "
        "not overlap, the first token of each unscored.",
        "ROUGE: all items of cnndm_eval.jsonl, the task through the chat template, articles cut "
        "so that a prompt has "
        f"at most {PROMPT} tokens, at most {ANSWER} greedy tokens, {BATCH} at once; rouge-score "
        "with stemming. The "
        "engine and transformers in the same dtype, same prompts, same ends. Times are not "
        "comparable: transformers' "
        "answers are kept from one run to the next.",
    ]
    return make_result(rows, notes)


def _perplexity(context: VerifyContext) -> Fact:
    from modelmill.eval.bench_targets import EngineScorer
    from modelmill.eval.datasets import read_text
    from modelmill.eval.perplexity import measure_perplexity

    llm = context.llm("float32")
    ids = llm.tokenizer.encode(
        read_text(context.shared / "data/text/wikitext2_test_a.txt"), bos=False
    )[:LIMIT]
    context.log("  perplexity: modelmill")
    on_progress = context.progress("perplexity")
    measure = functools.partial(
        measure_perplexity, ids, max_length=WINDOW, stride=WINDOW, on_progress=on_progress
    )
    engine_result = measure(EngineScorer(llm.engine_core))
    del llm

    def make() -> dict[str, Any]:
        context.log("  perplexity: transformers")
        result = measure(context.reference())
        return {"perplexity": result.perplexity, "tokens": result.tokens}

    expected = context.cached_json("perplexity", [context.gguf.name, ids, WINDOW], make)
    off = 100 * (engine_result.perplexity / expected["perplexity"] - 1)
    measured = (
        f"{engine_result.perplexity:.6f} for {expected['perplexity']:.6f} over "
        f"{engine_result.tokens} scored tokens: {off:+.5f} %"
    )
    return Fact(
        "perplexity, float32: within 0.1 %",
        measured,
        abs(off) <= 0.1 and engine_result.tokens == expected["tokens"],
    )


def _rouge(context: VerifyContext, dtype: str, bound: float) -> list[Fact]:
    import transformers

    from modelmill.eval import article_summarization as eval_summaries
    from modelmill.eval.datasets import read_articles
    from modelmill.eval.rouge import ROUGE_TYPES, RougeScorer

    items = read_articles(context.shared / "data/text/cnndm_eval.jsonl", None)
    llm = context.llm(dtype)
    task = eval_summaries.make_summary_task(llm, items, ANSWER, max_input=PROMPT)
    names = {
        "modelmill": f"modelmill-{context.digest[:12]}-{dtype}",
        "transformers": f"transformers-{transformers.__version__}-{dtype}",
    }
    sides: dict[str, Summarizer] = {
        "modelmill": eval_summaries.EngineSummarizer(llm, BATCH, names["modelmill"])
    }
    store = eval_summaries.SummaryResumeFile(context.out / "kept" / "summaries.jsonl")

    def decode(ids: list[int]) -> str:
        return str(llm.tokenizer.decode(ids))

    sides["transformers"] = _LazyReference(context, dtype, names["transformers"])
    results, reports = {}, {}
    for side, summarizer in sides.items():
        context.log(f"  ROUGE: {side} in {dtype}")
        on_progress = context.progress(f"{side}, {dtype}")
        results[side] = eval_summaries.summarize_articles(
            task, summarizer, decode, store=store, on_progress=on_progress
        )
        reports[side] = eval_summaries.rouge_and_speed(results[side], items, RougeScorer())
    off = eval_summaries.rouge_differences(reports["modelmill"], reports["transformers"])
    equal = eval_summaries.count_equal_texts(results["modelmill"], results["transformers"])
    description = ", ".join(
        f"{k} {reports['modelmill']['rouge'][k]:.3f} ({off[k]:+.3f})" for k in ROUGE_TYPES
    )
    return [
        Fact(
            f"ROUGE, {dtype}: each within {bound:g}",
            description,
            all(abs(v) <= bound for v in off.values()),
        ),
        Fact(f"equal summaries, {dtype}", f"{equal} of {len(items)}", None),
    ]


class _LazyReference(Summarizer):
    """transformers, loaded only where an answer is not kept yet."""

    def __init__(self, context: VerifyContext, dtype: str, name: str) -> None:
        super().__init__(None, BATCH, name)
        self._context, self._dtype = context, dtype

    def answer_prompts(self, prompts: Sequence[Ids], max_new_tokens: int, eos_ids: Ids) -> Answers:
        """Greedy answers in one batch."""
        if self.model is None:
            self.model = self._context.reference(self._dtype)
        answers, _ = self.model.generate(prompts, max_new_tokens, eos_ids)
        return answers

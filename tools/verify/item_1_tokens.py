"""SmolLM2 float32 gives transformers' tokens: alone, in a batch, with a warm prefix cache."""

from __future__ import annotations

from typing import Any

from tools.verify.context import VerifyContext
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "SmolLM2 in float32: the same greedy tokens as transformers"
PROMPTS, TOKENS = 20, 64


def run(context: VerifyContext) -> VerifyResult:
    """20 MT-bench first turns through the chat template, 64 greedy tokens each."""
    llm = context.llm("float32", enable_prefix_caching=False)
    prompts, eos = encode_questions(llm, context.questions(PROMPTS))
    expected = reference_answers(context, prompts, eos)
    rows = [
        _fact("one by one", [greedy_ids(llm, [p], eos)[0] for p in prompts], expected),
        _fact(f"all {PROMPTS} in one batch", greedy_ids(llm, prompts, eos), expected),
    ]
    warm = context.llm("float32")
    greedy_ids(warm, prompts, eos)
    again = _generate(warm, prompts, eos)
    cached = [answer.cached_tokens for answer in again]
    rows.append(
        _fact("in one batch, the prefix cache warm", [_ids(a, eos) for a in again], expected)
    )
    rows.append(
        _fact(
            "one by one, the prefix cache warm",
            [greedy_ids(warm, [p], eos)[0] for p in prompts],
            expected,
        )
    )
    lengths = [len(p) for p in prompts]
    rows.append(
        Fact(
            "the warm run took its prompts' pages from the cache",
            f"{sum(cached)} of {sum(lengths)} prompt tokens, at least {min(cached)} of each prompt",
            all(count > 0 for count in cached),
        )
    )
    rows.append(_margin_fact(expected))
    notes = [
        f"Prompts of {min(lengths)} to {max(lengths)} tokens; greedy, ends at "
        f"{', '.join(map(str, eos))} "
        f"or after {TOKENS} tokens. transformers: LlamaForCausalLM, float32, sdpa, one prompt at "
        "a time."
    ]
    return make_result(rows, notes)


def encode_questions(llm: Any, texts: list[str]) -> tuple[list[list[int]], tuple[int, ...]]:
    """(ids of each question as a conversation, ids that end an answer)."""
    prompts = [list(llm.chat_format.encode([{"role": "user", "content": text}])) for text in texts]
    return prompts, tuple(dict.fromkeys((*llm.eos_ids, *llm.chat_format.stop_ids)))


def greedy_ids(llm: Any, prompts: list[list[int]], eos: tuple[int, ...]) -> list[list[int]]:
    """Greedy ids of each prompt, all in one batch, without the id that ended them."""
    return [_ids(answer, eos) for answer in _generate(llm, prompts, eos)]


def reference_answers(
    context: VerifyContext, prompts: list[list[int]], eos: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return transformers' answers and the gaps between their two best logits; cached."""

    def make() -> list[dict[str, Any]]:
        reference = context.reference()
        answers = []
        for number, prompt in enumerate(prompts, 1):
            ids = _cut_before_eos(reference.generate([prompt], TOKENS, eos)[0][0], eos)
            logits = reference.logits([*prompt, *ids])[len(prompt) - 1 :]
            best = logits.topk(2, dim=-1).values
            answers.append({"ids": ids, "margins": (best[:, 0] - best[:, 1]).tolist()})
            context.log(f"  transformers {number}/{len(prompts)}")
        return answers

    return context.cached_json("tokens", [context.gguf.name, prompts, eos, TOKENS], make)


def _generate(llm: Any, prompts: list[list[int]], eos: tuple[int, ...]) -> list[Any]:
    from modelmill import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, stop_token_ids=eos, repetition_penalty=1.0
    )
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)


def _ids(answer: Any, eos: tuple[int, ...]) -> list[int]:
    return _cut_before_eos(answer.outputs[0].token_ids, eos)


def _cut_before_eos(ids: list[int], eos: tuple[int, ...]) -> list[int]:
    return list(ids[:-1]) if ids and ids[-1] in eos else list(ids)


def _fact(mode: str, own: list[list[int]], expected: list[dict[str, Any]]) -> Fact:
    """Equal, or where the first difference is and how near the two best logits lie there."""
    wrong = []
    for number, (actual, other) in enumerate(zip(own, expected, strict=True)):
        if actual != other["ids"]:
            at = next(
                (i for i, (a, b) in enumerate(zip(actual, other["ids"])) if a != b),
                min(len(actual), len(other["ids"])),
            )
            wrong.append(f"prompt {number} at token {at} (margin there {other['margins'][at]:.2g})")
    tokens = sum(len(other["ids"]) for other in expected)
    summary = f"{len(expected) - len(wrong)} of {len(expected)} answers equal, {tokens} tokens"
    return Fact(
        f"token for token, {mode}",
        summary + (f"; differ: {'; '.join(wrong)}" if wrong else ""),
        not wrong,
    )


def _margin_fact(expected: list[dict[str, Any]]) -> Fact:
    every = sorted(margin for other in expected for margin in other["margins"])
    near = sum(margin < 1e-3 for margin in every)
    summary = (
        f"smallest {every[0]:.2g}, {near} of {len(every)} below 0.001 (float32 noise is about "
        "0.0001)"
    )
    return Fact("distance of transformers' two best logits", summary, None)

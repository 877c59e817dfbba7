"""The engine on a GPU: the same tokens as the CPU in float32, from the same checkpoint.

    python -m tools.gpu_check expect GGUF QUESTIONS.jsonl tokens.json     on a CPU: build float32, answer, keep the ids
    python -m tools.gpu_check compare GGUF tokens.json [--out FILE]       on a GPU: build float32, answer, compare

Both build with acceptance. Answers: the first turns of the first 20 questions through the chat
template, 64 greedy tokens, one by one, all in one batch, and with the prefix cache warm. bfloat16
is reported beside it: the share of equal answers.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from modelmill import LLM, SamplingParams
from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine

COUNT, TOKENS = 20, 64
KV_BYTES = 1 << 30  # enough for all answers at once, and leaves the card to others
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)


def engine(gguf: Path, target: str, dtype: str, folder: Path) -> LLM:
    """Build with acceptance and open."""
    out = folder / f"{target}-{dtype}.engine"
    started = time.perf_counter()
    report = build_engine(gguf, out, BuildConfig(dtype=dtype, target=target))
    print(
        f"{out.name}: {report['verdict']}, built in {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return LLM(out, device=target, kv_cache_bytes=KV_BYTES)


def write_expected(args: argparse.Namespace) -> int:
    """Answer on the CPU and write prompts and tokens."""
    lines = args.questions.read_text().splitlines()[:COUNT]
    talks = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(args.gguf, "cpu", "float32", Path(folder))
        answers = [llm.chat(messages, GREEDY)[0] for messages in talks]
    rows = [{"prompt": a.prompt_token_ids, "tokens": a.outputs[0].token_ids} for a in answers]
    args.tokens.write_text(json.dumps(rows))
    print(f"{args.tokens}: {len(rows)} answers, {sum(len(r['tokens']) for r in rows)} tokens")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Answer on the GPU and compare."""
    rows = json.loads(args.tokens.read_text())
    prompts = [row["prompt"] for row in rows]
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(args.gguf, "cuda", "float32", Path(folder))
        # the CPU's ids came through the chat format, so its end tokens count here too
        assert llm.chat_format is not None
        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, stop_token_ids=tuple(llm.chat_format.stop_ids)
        )
        modes = {
            "one by one": [llm.generate([p], params)[0] for p in prompts],
            "one batch": llm.generate(prompts, params),
        }
        modes["prefix warm"] = llm.generate(prompts, params)
        for name, answers in modes.items():
            facts[name] = sum(
                a.outputs[0].token_ids == r["tokens"] for a, r in zip(answers, rows, strict=True)
            )
        facts["cached prompt tokens"] = sum(a.cached_tokens for a in modes["prefix warm"])
        facts["kernels"] = dict(llm.engine_core.ops.backends)
        del llm, modes
        half = engine(args.gguf, "cuda", "bfloat16", Path(folder))
        answers = half.generate(prompts, params)
        facts["bfloat16 answers equal to float32"] = sum(
            a.outputs[0].token_ids == r["tokens"] for a, r in zip(answers, rows, strict=True)
        )
    facts["answers"] = len(rows)
    print(json.dumps(facts, indent=1))
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1))
    same = all(facts[mode] == len(rows) for mode in ("one by one", "one batch", "prefix warm"))
    print("the same tokens as the CPU in float32" if same else "TOKENS DIFFER")
    return 0 if same else 1


def main() -> int:
    """Parse and go."""
    parser = argparse.ArgumentParser(prog="tools.gpu_check")
    verbs = parser.add_subparsers(required=True)
    expect = verbs.add_parser("expect")
    expect.add_argument("gguf", type=Path)
    expect.add_argument("questions", type=Path)
    expect.add_argument("tokens", type=Path)
    expect.set_defaults(run=write_expected)
    done = verbs.add_parser("compare")
    done.add_argument("gguf", type=Path)
    done.add_argument("tokens", type=Path)
    done.add_argument("--out", type=Path)
    done.set_defaults(run=compare)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())

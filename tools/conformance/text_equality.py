"""The same text for every request mode: alone, batched, streamed or not, over HTTP or Python.

In float32 every text has to be the same, greedy and seeded; in bfloat16 the share that is equal is
reported.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = "the same text alone, in a batch, streamed or not, over HTTP or from Python"
PACKAGE = "modelmill"
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT.parent / "shared" / "data" / "text" / "mt_bench_questions.jsonl"
COUNT, TOKENS = 24, 48
REQUEST_MODES = (
    "HTTP, alone",
    "HTTP, streamed",
    "HTTP, all at once",
    "HTTP, all at once, streamed",
    "class, one batch",
)
SAMPLING_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2**40 + 1},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "seed": 3, "repetition_penalty": 1.1},
)


def run(base_url: str, model: str, out: Path) -> SuiteResult:
    """float32 on the server that runs already, then bfloat16 on one of its own."""
    from tools.conformance import server

    if not QUESTIONS.is_file():
        return SuiteResult(
            0,
            excluded=[
                FailedCheck("24 questions", f"needs {QUESTIONS.name} in the shared data folder")
            ],
        )
    asks = _make_requests()
    result = SuiteResult(0)
    equal_by_mode = measure(base_url, model, server.engine(out.parent), asks)
    result.facts["requests"] = (
        f"{len(asks)}: {COUNT} questions, greedy and three seeded settings, {TOKENS} tokens"
    )
    for way, equal in equal_by_mode.items():
        result.facts[f"float32, {way}"] = f"{equal} of {len(asks)} as the class says alone"
        if equal == len(asks):
            result.passed += 1
        else:
            result.failed.append(
                FailedCheck(f"float32, {way}", f"{len(asks) - equal} of {len(asks)} texts differ")
            )
    half = bfloat16(out)
    with server.serve_engine(half, out / "bfloat16.log") as url:
        for way, equal in measure(url, server.MODEL, half, asks).items():
            result.facts[f"bfloat16, {way}"] = f"{equal} of {len(asks)} ({equal / len(asks):.0%})"
    return result


def bfloat16(out: Path) -> Path:
    """SmolLM2 in bfloat16, built once."""
    from modelmill.artifact.store import is_engine_folder
    from modelmill.checkpoint.pull import pull
    from modelmill.core.config import BuildConfig
    from modelmill.llm import build_engine
    from tools.conformance import server

    path = out / "smollm2-bfloat16.engine"
    if not is_engine_folder(path):
        config = BuildConfig(dtype="bfloat16", quantization="none", target="cpu")
        build_engine(pull(server.MODEL, ROOT / "out" / "models"), path, config)
    return path


def _make_requests() -> list[dict[str, Any]]:
    """Conversations with their settings."""
    lines = QUESTIONS.read_text("utf-8").splitlines()[:COUNT]
    talks = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    return [
        {"messages": messages, "max_tokens": TOKENS, **options}
        for options in SAMPLING_SETTINGS
        for messages in talks
    ]


def measure(
    base_url: str, model: str, engine: Path, asks: Sequence[dict[str, Any]]
) -> dict[str, int]:
    """Count, per way, the texts that equal those of ``LLM`` for one request at a time."""
    from modelmill.core.types import SamplingParams
    from modelmill.llm import LLM

    llm = LLM(engine, device="cpu", threads=1, max_model_len=2048, kv_cache_bytes=1 << 29)
    talks = [ask["messages"] for ask in asks]
    params = [
        SamplingParams(**{key: value for key, value in ask.items() if key != "messages"})
        for ask in asks
    ]
    alone = [
        llm.chat(messages, options, progress=False)[0].outputs[0].text
        for messages, options in zip(talks, params, strict=True)
    ]
    batch = [answer.outputs[0].text for answer in llm.chat(talks, params, progress=False)]
    llm.close()

    def answer_in_mode(way: str) -> Callable[[dict[str, Any]], str]:
        # each way begins with no prefix in the cache, as the class alone does: in bfloat16 a prompt
        # that is computed
        # in other pieces may go on otherwise, and that is not what this suite checks
        options = {"model": model, "stream": way.endswith("streamed"), "cache_salt": way}
        return lambda ask: _answer_text(base_url, {**options, **ask})

    with ThreadPoolExecutor(16) as pool:
        answers = {way: [*map(answer_in_mode(way), asks)] for way in REQUEST_MODES[:2]}
        answers |= {way: [*pool.map(answer_in_mode(way), asks)] for way in REQUEST_MODES[2:4]}
        answers[REQUEST_MODES[4]] = batch
    return {
        way: sum(a == b for a, b in zip(alone, texts, strict=True))
        for way, texts in answers.items()
    }


def _answer_text(base_url: str, body: dict[str, Any]) -> str:
    """The text of one answer.

    Raises OSError where it is refused, ValueError where a stream is cut.
    """
    head = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), head
    )
    with urllib.request.urlopen(request, timeout=900) as response:
        if not body["stream"]:
            return str(json.load(response)["choices"][0]["message"]["content"])
        lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        raise ValueError("the stream has no end")
    return "".join(
        json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]
    )

"""``python -m tools.agent_replay``: an agent's session of 60,000 tokens, with and without cache.

Every turn goes to a server with the prefix cache and then to one without. From the second turn on
at least 99 % of what the turn before had as its prompt must come from the cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.agent_replay.conversation import (
    AgentTurn,
    anthropic_request,
    make_session,
    openai_request,
)
from tools.agent_replay.seeded_engine import make_checkpoint
from tools.soak.server import SoakServer

CONTEXT = 131_072
MIN_CACHED = 0.99
PAGE_SIZE = 16
"""Tokens of a KV page; only whole pages are shared."""
MakeRequest = Callable[[Sequence[AgentTurn], int], dict[str, Any]]
DIALECTS: dict[str, tuple[str, MakeRequest]] = {
    "anthropic": ("/v1/messages", anthropic_request),
    "openai": ("/v1/chat/completions", openai_request),
}
FLAGS = ("--device", "cpu", "--chat-template", "chatml", "--max-num-batched-tokens", "8192")


@dataclass(frozen=True)
class ReplayedTurn:
    """A turn as the server counted it.

    Attributes:
        prompt: tokens.
        cached: of these, from the prefix cache.
        known: tokens of the prompt before in whole pages, with which this prompt begins.
        seconds: with the cache.
        uncached_seconds: without it.
    """

    prompt: int
    cached: int
    known: int
    seconds: float
    uncached_seconds: float

    @property
    def cached_share(self) -> float:
        """Of what could be known before."""
        return self.cached / self.known if self.known else 1.0


def main(argv: list[str] | None = None) -> int:
    """Replay, print the table, and return 1 if too little came from the cache."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        engine = _build(Path(folder), options.seed)
        # without a cache every prompt is computed whole, on the same machine and in turn
        with (
            SoakServer(engine, (*FLAGS, "--kv-cache-bytes", "256MiB")) as cached,
            SoakServer(engine, (*FLAGS, "--no-enable-prefix-caching")) as uncached,
        ):
            results = {
                name: replay(name, options.turns, options.tokens, options.seed, cached, uncached)
                for name in options.dialects
            }
    failed = [name for name, turns in results.items() if not enough_cached(turns)]
    if failed:
        print(f"FAILED: less than {MIN_CACHED:.0%} from the cache: {', '.join(failed)}")
    return 1 if failed else 0


def _build(folder: Path, seed: int) -> Path:
    from modelmill.core.config import BuildConfig
    from modelmill.llm import build_engine

    checkpoint = make_checkpoint(folder / "checkpoint", CONTEXT, seed)
    engine = folder / "agent.engine"
    build_engine(checkpoint, engine, BuildConfig(dtype="float32", target="cpu"))
    return engine


def replay(
    dialect: str, turns: int, tokens: int, seed: int, cached: SoakServer, uncached: SoakServer
) -> list[ReplayedTurn]:
    """Replay a session in one dialect and print a line for each turn.

    The sessions of two dialects differ, so that neither profits from the other's cache.
    """
    path, make_request = DIALECTS[dialect]
    session = make_session(turns, tokens, seed + list(DIALECTS).index(dialect))
    print(f"{dialect}:\n turn  prompt  cached  of known  seconds  uncached  faster", flush=True)
    replayed: list[ReplayedTurn] = []
    for number in range(turns):
        body = make_request(session, number)
        prompt, hits, seconds = _send(cached, path, body)
        _, _, uncached_seconds = _send(uncached, path, body)
        known = replayed[-1].prompt // PAGE_SIZE * PAGE_SIZE if replayed else 0
        turn = ReplayedTurn(prompt, hits, known, seconds, uncached_seconds)
        replayed.append(turn)
        print(
            f"{number + 1:5d} {prompt:7d} {hits:7d} {turn.cached_share:9.2%} {seconds:8.2f} "
            f"{uncached_seconds:9.2f} {uncached_seconds / seconds:6.1f}x",
            flush=True,
        )
    later = replayed[1:]
    speedup = sum(each.uncached_seconds for each in later) / sum(each.seconds for each in later)
    print(f"from the second turn on: {speedup:.1f} times as fast as without the cache\n")
    return replayed


def _send(server: SoakServer, path: str, body: dict[str, Any]) -> tuple[int, int, float]:
    """Prompt tokens, cached tokens and seconds of a request."""
    began = time.perf_counter()
    status, answer = server.request(path, {"model": server.model, **body}, 600)
    seconds = time.perf_counter() - began
    if status != 200:
        raise RuntimeError(f"{path} answers {status}: {answer}")
    return *read_usage(answer["usage"]), seconds


def read_usage(usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens and cached tokens, in either dialect."""
    if "input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + (
            usage.get("cache_creation_input_tokens") or 0
        ), cached
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def enough_cached(turns: Sequence[ReplayedTurn]) -> bool:
    """Whether every turn after the first had what could be known before from the cache."""
    return all(each.cached_share >= MIN_CACHED for each in turns[1:])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.agent_replay", description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=60_000, help="of the whole session, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=list(DIALECTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

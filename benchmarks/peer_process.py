"""One side of a comparison: an engine in its own process, called over a pipe, timed by one rule.

The driver (``PeerProcess``) and the served process (``serve_requests``) share this file, so
that modelmill and every peer get the same prompts, timed by the same clock. Standard library
only: it runs inside the peers' own Pythons.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
MIN_TOKEN_ID, MAX_TOKEN_ID = 5, 30000
"""Prompt ids are drawn from here: no special tokens, within the smallest vocabulary of the table.
"""

Lengths = Sequence[tuple[int, int]]
Prepared = Callable[[], int]
Prepare = Callable[..., Prepared]
"""Prompts and numbers of new tokens → what is timed, which returns how many tokens came. With
pictures, which only sides that know them are asked for, ``images`` as well."""
Images = Mapping[str, int]
"""seed, side: a picture of S × S pixels for each request. seed, embeddings, width: so many
embeddings for each, as if its picture had been through the encoder before."""


class PeerError(RuntimeError):
    """A side's process ended or answered with an error; the text says where its log is."""


class PeerProcess:
    """The driver's end: starts the process, calls it with given lengths, ends it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Start it; ``began`` is the moment. env: added to this process's environment."""
        self.name, self._log = name, log
        self.facts: dict[str, Any] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._sink = log.open("ab")
        self.start_time = time.perf_counter()
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            text=True,
        )

    def ready(self, within: float | None = None) -> dict[str, Any]:
        """Wait until the engine is loaded; what it says of itself (versions, device).

        within: seconds from its start after which it is killed, and a PeerError says so.
        """
        if within is not None:
            assert self._process.stdout is not None
            left = max(0.0, self.start_time + within - time.perf_counter())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise PeerError(f"{self.name}: not ready after {within:g} s (log: {self._log})")
        self.facts = self._read()
        return self.facts

    def generate(self, lengths: Lengths, seed: int, images: Images | None = None) -> float:
        """Return seconds of one call with (prompt, output) lengths; ids are drawn with ``seed``.

        images: a picture for each request, of a side that takes pictures.
        """
        request: dict[str, Any] = {"lengths": [list(pair) for pair in lengths], "seed": seed}
        answer = self._request(request | ({} if images is None else {"images": dict(images)}))
        num_requested = sum(output for _, output in lengths)
        if answer["tokens"] != num_requested:
            raise PeerError(f"{self.name} gave {answer['tokens']} tokens, expected {num_requested}")
        return float(answer["seconds"])

    def randomize_weights(self, weights: str) -> None:
        """Randomize the weights by a rule of ``make_checkpoint.py``, if the side loaded none."""
        self._request({"randomise": weights})

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            # it is about to end by itself, and left a question unread
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._sink.close()

    def _request(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        # if it has ended, reading raises an error with its last output
        with contextlib.suppress(OSError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": _last_line(self._log)}
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']} (log: {self._log})")
        return dict(answer)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "its process ended without a word"


def random_prompts(lengths: Lengths, seed: int) -> list[list[int]]:
    """Seeded prompt ids, the same on every side."""
    source = random.Random(seed)
    return [
        [source.randrange(MIN_TOKEN_ID, MAX_TOKEN_ID) for _ in range(prompt)]
        for prompt, _ in lengths
    ]


def take_over_stdout() -> IO[str]:
    """The pipe to the driver; whatever else prints goes to stderr from now on.

    Call before importing an engine.
    """
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def serve_requests(
    prepare: Prepare,
    facts: Mapping[str, Any],
    pipe: IO[str],
    *,
    randomize: Callable[[str], object] | None = None,
) -> None:
    """Answer the driver until it hangs up.

    ``prepare`` makes the requests outside the clock; its result is timed.
    """
    print(json.dumps(dict(facts)), file=pipe, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "randomise" in request:
            if randomize is not None:
                randomize(request["randomise"])
            answer: dict[str, Any] = {}
        else:
            lengths = request["lengths"]
            prompts = random_prompts(lengths, request["seed"])
            more = {"images": request["images"]} if "images" in request else {}
            call = prepare(prompts, [output for _, output in lengths], **more)
            began = time.perf_counter()
            tokens = call()
            answer = {"seconds": time.perf_counter() - began, "tokens": tokens}
        print(json.dumps(answer), file=pipe, flush=True)

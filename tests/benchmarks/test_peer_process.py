"""A side in a process of its own: what it is asked, what it answers, what happens when it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peer_process import (
    MAX_TOKEN_ID,
    MIN_TOKEN_ID,
    PeerError,
    PeerProcess,
    random_prompts,
)

ENGINE = """
import sys
from benchmarks.peer_process import serve_requests, take_over_stdout
pipe = take_over_stdout()
print("noise of a library on stdout")
def prepare(prompts, outputs):
    if len(prompts) == 2:
        raise ValueError("two prompts are too many")
    return lambda: sum(outputs) - (len(prompts[0]) == 7)
def drawn(weights):
    print("drawn", weights, file=sys.stderr)
serve_requests(prepare, {"device": "none", "versions": {"engine": "1"}}, pipe, randomize=drawn)
"""


@pytest.fixture
def side(tmp_path: Path) -> Iterator[PeerProcess]:
    made = PeerProcess("fake", [sys.executable, "-c", ENGINE], tmp_path / "logs" / "fake.log")
    yield made
    made.close()


def test_a_side_says_what_it_is_answers_and_ends(side: PeerProcess, tmp_path: Path) -> None:
    assert side.ready() == {"device": "none", "versions": {"engine": "1"}}
    assert 0 <= side.generate([(3, 5)], seed=1) < 60
    assert side.generate([(3, 5)] * 3, seed=1) >= 0
    side.randomize_weights("uniform")
    side.close()
    log = (tmp_path / "logs" / "fake.log").read_text()
    assert "noise of a library" in log, "what a library prints must not reach the pipe"
    assert "drawn uniform" in log


def test_a_side_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    side = PeerProcess("slow", waiting, tmp_path / "slow.log")
    with pytest.raises(PeerError, match="slow: not ready after 0 s"):
        side.ready(within=0)
    side.close()
    assert side._process.returncode == -signal.SIGKILL


def test_a_side_that_is_ready_in_time_says_what_it_is(side: PeerProcess) -> None:
    assert side.ready(within=600)["device"] == "none"


def test_another_number_of_tokens_is_an_error(side: PeerProcess) -> None:
    side.ready()
    with pytest.raises(PeerError, match="gave 4 tokens, expected 5"):
        side.generate([(7, 5)], seed=1)


def test_a_process_that_ended_is_named_with_its_last_words(side: PeerProcess) -> None:
    side.ready()
    with pytest.raises(
        PeerError, match=r"fake: ValueError: two prompts are too many \(log: .*fake.log\)"
    ):
        side.generate([(3, 5), (3, 5)], seed=1)
    with pytest.raises(PeerError, match="too many"):
        side.generate([(3, 5)], seed=1)


def test_a_process_that_is_about_to_end_can_be_closed(
    side: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.ready()
    with pytest.raises(PeerError):
        side.generate([(3, 5), (3, 5)], seed=1)
    side._process.wait()
    with pytest.raises(PeerError):
        side.generate([(3, 5)], seed=1)  # stays in the pipe's buffer
    monkeypatch.setattr(side._process, "poll", lambda: None)  # as a moment before
    side.close()
    assert side._process.returncode == 1


def test_prompts_are_the_same_on_every_side_and_others_for_another_seed() -> None:
    lengths = [(4, 1), (9, 2)]
    assert random_prompts(lengths, 3) == random_prompts([(4, 7), (9, 7)], 3)
    assert random_prompts(lengths, 3) != random_prompts(lengths, 4)
    assert [len(each) for each in random_prompts(lengths, 3)] == [4, 9]
    assert all(
        MIN_TOKEN_ID <= id < MAX_TOKEN_ID for each in random_prompts(lengths, 3) for id in each
    )

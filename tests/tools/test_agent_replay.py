"""The session that an agent's replay sends, and how its figures are judged."""

from __future__ import annotations

import json

import pytest

from tools.agent_replay.__main__ import ReplayedTurn, enough_cached, main, read_usage
from tools.agent_replay.conversation import anthropic_request, make_session, openai_request


def test_a_session_is_seeded_and_as_long_as_asked() -> None:
    session = make_session(6, 60_000, seed=1)
    assert session == make_session(6, 60_000, seed=1)
    assert session != make_session(6, 60_000, seed=2)
    assert all(len(turn.calls) in (2, 3) for turn in session)
    length = sum(
        len(turn.question) + len(turn.text) + sum(len(call.result) for call in turn.calls)
        for turn in session
    )
    assert 0.95 < length / 60_000 < 1.05


def test_a_turn_begins_with_the_one_before() -> None:
    session = make_session(4, 4000, seed=0)
    for turn in range(1, 4):
        before, after = (openai_request(session, number)["messages"] for number in (turn - 1, turn))
        assert after[: len(before)] == before
    first, second = (anthropic_request(session, number) for number in (1, 2))
    assert first["system"][0] != second["system"][0], "the billing header changes"
    assert first["system"][1:] == second["system"][1:]
    marked = [json.dumps(each).count("cache_control") for each in second["messages"]]
    assert (sum(marked), marked[-1]) == (1, 1), "the mark is on the newest message"


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 3, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 0},
        {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}},
    ],
)
def test_usage_in_both_dialects(usage: dict[str, object]) -> None:
    assert read_usage(usage) == (10, 7)


def test_the_first_turn_and_new_tokens_do_not_count() -> None:
    first = ReplayedTurn(1000, 0, 0, 1.0, 1.0)
    assert enough_cached([first, ReplayedTurn(9000, 990, 1000, 1.0, 2.0)])
    assert not enough_cached([first, ReplayedTurn(9000, 989, 1000, 1.0, 2.0)])


def test_a_short_session_comes_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--turns", "3", "--tokens", "12000"]) == 0
    assert capsys.readouterr().out.count("times as fast") == 2

"""The speed that ``run`` tells: tokens after the first ones, over the time after the first."""

from __future__ import annotations

import pytest

from modelmill.cli.run import output_to_json, print_speed
from modelmill.outputs import CompletionOutput, RequestOutput


def answer(counts: list[int], score: float | None = None) -> RequestOutput:
    """Answers of so many tokens to one prompt, the first token after one second, the last after
    three.
    """
    outputs = [
        CompletionOutput(index, token_ids=[7] * count, score=score)
        for index, count in enumerate(counts)
    ]
    return RequestOutput("a", None, [1, 2], outputs, first_token_seconds=1.0, seconds=3.0)


@pytest.mark.parametrize(
    ("counts", "rate"),
    [
        ([5], 4 / 2),
        ([2] * 16, 16 / 2),
        ([3, 1], 2 / 2),
        ([1], 1 / 3),
        ([1, 1], 2 / 3),
        ([], 0.0),
        ([0], 0.0),
    ],
)
def test_each_answer_of_a_prompt_has_a_first_token(
    counts: list[int], rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    request_output = answer(counts) if counts else answer([0])
    assert output_to_json(request_output, 9.0)["timing"]["tokens_per_s"] == pytest.approx(rate)
    print_speed([request_output], 3.0)
    assert f" {rate:.1f} tokens/s" in capsys.readouterr().err


def test_beams_and_several_prompts_are_counted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_to_json(answer([4, 4], score=-1.0), 9.0)["timing"][
        "tokens_per_s"
    ] == pytest.approx(8 / 3)
    print_speed([answer([3]), answer([3])], 3.0)
    assert "first token" not in (err := capsys.readouterr().err)
    assert "2.0 tokens/s" in err

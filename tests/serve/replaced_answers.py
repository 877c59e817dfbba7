"""Answers that the test model cannot generate, in place of its own."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.request_output_state import RequestOutputState


def replace_answers(
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    chars: int,
    reason: str = "stop",
    stop: str | None = None,
) -> None:
    """Give ``answer`` in place of what a model generates, so many characters a token.

    It ends for ``reason``, by the stop string ``stop``.
    """
    push = RequestOutputState.process_token_output

    def instead(self: RequestOutputState, token: Any) -> Any:
        delta, _ = push(self, token)
        output = self.output.outputs[0]
        end = len(output.token_ids) * chars
        text, output.text = answer[end - chars : end], answer
        output.finish_reason = reason if end >= len(answer) else None
        output.stop_reason = stop
        return type(delta)(0, text, delta.token_ids, output.finish_reason, self.output), False

    monkeypatch.setattr(RequestOutputState, "process_token_output", instead)

"""Template and tokens on both sides, the verdict, and the plot."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.eval import checkpoint_comparison
from modelmill.eval.checkpoint_comparison import (
    TokenizerCheck,
    TokenizerReference,
    draw_layer_errors,
)
from modelmill.eval.report import plot


def layer(name: str, place: int | None, error: float, ok: bool = True) -> dict[str, Any]:
    keys = ("max_abs", "mean_abs", "median_abs", "max_rel")
    return {
        "name": name,
        "layer": place,
        "module": name.rpartition(".")[2],
        **dict.fromkeys(keys, error),
        "ok": ok,
    }


def accept_report(accepted: bool) -> dict[str, Any]:
    verdict = "rounding differences only" if accepted else "bug at layer 1, module q_proj"
    place, module = (None, None) if accepted else (1, "q_proj")
    return {
        "accepted": accepted,
        "verdict": verdict,
        "layer": place,
        "module": module,
        "layers": [],
    }


RIGHT = TokenizerCheck("tokens", "a", "transformers", True)
WRONG = TokenizerCheck("tokens", "b", "transformers", False, 1, "5", "6")
UNSURE = TokenizerCheck("template", "c", "transformers", None, note="cannot render")


@pytest.mark.parametrize(
    ("accepted", "checks", "passed", "verdict"),
    [
        (True, [RIGHT, UNSURE], True, "rounding differences only"),
        (True, [RIGHT, WRONG], False, "the tokenizer differs"),
        (False, [RIGHT], False, "bug at layer 1, module q_proj"),
        (False, [WRONG], False, "bug at layer 1, module q_proj"),
    ],
)
def test_verdict(accepted: bool, checks: list[TokenizerCheck], passed: bool, verdict: str) -> None:
    result = checkpoint_comparison.compare_tokenizer_and_layers(
        None, None, lambda: accept_report(accepted), checks
    )  # type: ignore[arg-type]
    assert result["passed"] is passed
    assert result["verdict"].startswith(verdict)
    assert len(result["text"]) == len(checks)


def fake(encode: Any, render: Any) -> Any:
    chat = None if render is None else SimpleNamespace(render=render)
    return SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), chat_format=chat)


def plain(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)


def check(
    llm: Any, judge: TokenizerReference, monkeypatch: pytest.MonkeyPatch
) -> list[TokenizerCheck]:
    monkeypatch.setattr(
        checkpoint_comparison, "_transformers_tokenizer_reference", lambda checkpoint: judge
    )
    checkpoint: Any = SimpleNamespace(tokenizer_files=lambda: {"tokenizer.json": b""})
    return checkpoint_comparison.check_tokenizer_and_chat(llm, checkpoint)


def test_equal_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = check(fake(list, plain), TokenizerReference("other", list, plain), monkeypatch)
    assert {each.what for each in checks} == {"template", "tokens"}
    assert all(each.equal for each in checks)
    assert checks[0].what == "template", "the template comes first"


def test_the_first_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = check(
        fake(list, plain),
        TokenizerReference("other", lambda text: [*text[:4], "X"], None),
        monkeypatch,
    )
    template, first = checks[0], checks[1]
    assert template.equal is False
    assert "only other has no chat template" in str(template.note)
    assert (first.place, first.ours, first.theirs) == (4, "q", "X")


def test_a_template_that_the_other_side_cannot_render_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(messages: list[dict[str, str]]) -> str:
        raise ValueError("no system role")

    checks = check(fake(list, plain), TokenizerReference("other", list, fails), monkeypatch)
    assert [each.equal for each in checks if each.what == "template"] == [None, None]


def test_a_missing_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = SimpleNamespace(tokenizer_files=dict)
    assert checkpoint_comparison.check_tokenizer_and_chat(fake(list, None), none) == []
    llm = SimpleNamespace(tokenizer=None, chat_format=None)
    assert check(llm, TokenizerReference("other", list, None), monkeypatch)[0].equal is False


def test_plot_takes_zero_and_infinite_errors(tmp_path: Path) -> None:
    layers = [
        layer("embed", None, 0.0),
        layer("layers.0.q_proj", 0, 1e-6),
        layer("layers.1.q_proj", 1, math.inf, ok=False),
        layer("layers.1.o_proj", 1, 1e-2, ok=False),
        layer("head", None, 1e-6),
    ]
    layers[2]["max_rel"] = "inf"
    plot(tmp_path / "a.png", lambda axes: draw_layer_errors(axes, layers), "verdict")
    plot(tmp_path / "b.png", lambda axes: draw_layer_errors(axes, []), "verdict")
    assert (tmp_path / "a.png").stat().st_size > 1000

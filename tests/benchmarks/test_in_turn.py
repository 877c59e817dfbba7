"""Choices of kernels beside each other: what each of them changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import in_turn
from modelmill.ops.shelf import resolve


def test_choices_are_named_as_they_were_asked_for() -> None:
    assert in_turn.states_of(["linear=triton,rotation=torch"]) == {
        "all kernels": {},
        "linear=triton,rotation=torch": {"linear": "triton", "rotation": "torch"},
    }


def test_a_name_says_what_changes_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product from elsewhere takes the op that spans it along: the difference is not the product's alone."""
    plain = resolve("cpu")
    chosen = dict.fromkeys(plain.chosen, "cuda")
    taken = chosen | {"linear": "triton", "gated_linear": "torch"}
    known = {frozenset(): chosen, frozenset({"linear"}): taken, frozenset({"rotation"}): chosen | {"rotation": "torch"}}
    monkeypatch.setattr(in_turn, "resolve", lambda _, asked=(): replace(plain, chosen=known[frozenset(asked)]))
    named = in_turn.told(in_turn.states_of(["linear=triton", "rotation=torch"]))
    assert list(named) == ["all kernels", "linear=triton (and so gated_linear=torch)", "rotation=torch"]
    assert list(named.values()) == [{}, {"linear": "triton"}, {"rotation": "torch"}]

"""Choices of kernels beside each other: what each of them changes."""

from __future__ import annotations

import pytest

from benchmarks import ab_steps
from modelmill.ops.registry import select_backends


def test_choices_are_named_as_they_were_asked_for() -> None:
    assert ab_steps.kernel_choices(["linear=triton,rope_cos_sin=torch"]) == {
        "all kernels": {},
        "linear=triton,rope_cos_sin=torch": {"linear": "triton", "rope_cos_sin": "torch"},
    }


def test_a_name_says_what_changes_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product from elsewhere takes the op that spans it along: the difference is not the
    product's alone.
    """
    plain = select_backends("cpu")
    chosen = dict.fromkeys(plain.backends, "cuda")
    backends = chosen | {"linear": "triton", "linear_swiglu": "torch"}
    known = {
        frozenset(): chosen,
        frozenset({"linear"}): backends,
        frozenset({"rope_cos_sin"}): chosen | {"rope_cos_sin": "torch"},
    }
    monkeypatch.setattr(
        ab_steps,
        "select_backends",
        lambda _, overrides=(): plain.replace({}, known[frozenset(overrides)]),
    )
    named = ab_steps.label_states(ab_steps.kernel_choices(["linear=triton", "rope_cos_sin=torch"]))
    assert list(named) == [
        "all kernels",
        "linear=triton (and so linear_swiglu=torch)",
        "rope_cos_sin=torch",
    ]
    assert list(named.values()) == [{}, {"linear": "triton"}, {"rope_cos_sin": "torch"}]

"""The shelf: variants are picked once, switched by hand, and never bypassed."""

from __future__ import annotations

import pytest

from modelmill.core.errors import UsageError
from modelmill.ops import shelf


def test_every_op_is_chosen_and_callable() -> None:
    ops = shelf.resolve("cpu")
    assert set(ops.chosen) == {*shelf.OPS, *shelf.SPANS}
    assert all(callable(getattr(ops, op)) for op in shelf.OPS)


def test_a_switched_kernel_is_the_reference() -> None:
    ops = shelf.resolve("cpu", {"rms_norm": "torch"})
    assert ops.rms_norm is shelf.reference("rms_norm")
    assert ops.chosen["rms_norm"] == "torch"


@pytest.mark.parametrize("op", shelf.SPANS)
def test_a_spanning_op_is_off_where_one_of_its_ops_was_switched(op: str) -> None:
    ops = shelf.resolve("cpu", {shelf.SPANS[op][0]: "torch"})
    assert getattr(ops, op) is None
    assert ops.chosen[op] == "torch"


@pytest.mark.parametrize("op", shelf.SPANS)
def test_a_spanning_op_can_be_switched_off(op: str) -> None:
    ops = shelf.resolve("cpu", {op: "torch"})
    assert getattr(ops, op) is None
    assert ops.chosen["linear"] == shelf.resolve("cpu").chosen["linear"]


@pytest.mark.parametrize(
    "wrong", [{"rms_nrom": "torch"}, {"rms_norm": "cuda"}, {"linear": "abacus"}, {"decode": "cuda"}], ids=str
)
def test_what_cannot_be_is_one_line(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as told:
        shelf.resolve("cpu", wrong)
    assert "\n" not in str(told.value)

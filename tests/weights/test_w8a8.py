"""8-bit weights for 8-bit activations: what is stored, what is multiplied, what a damaged file is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import CorruptArtifact
from modelmill.ops import shelf
from modelmill.ops.eight_bit import Quantized
from modelmill.weights import fp8, held, w8a8

KINDS: dict[str, Any] = {"w8a8": w8a8.Held, "fp8": fp8.Held}
EXACT = {"w8a8": 1e-5, "fp8": 1e-4}


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.tuples(st.integers(1, 12), st.integers(1, 200)),
    per_channel=st.booleans(),
    given_scale=st.sampled_from([0.0, -1.0, 0.03]),
)
def test_what_is_stored_is_what_is_multiplied(
    kind: str, size: tuple[int, int], per_channel: bool, given_scale: float
) -> None:
    weight = drawn(*size, seed=size[1])
    weight[0] = 0.0
    kept = KINDS[kind].pack(weight, torch.float32, per_channel=per_channel, input_scale=given_scale)
    stored = kept.tensors()
    info = held.packed_info(kind, size, torch.float32, per_channel=per_channel)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == info
    assert list(stored) == list(info), "written in the order announced"
    step = kept.scale[:, None] * 0.5 if kind == "w8a8" else weight.abs() * 2.0**-4 + kept.scale[:, None] * 2.0**-9
    assert bool(((kept.dense() - weight).abs() <= step * 1.0001).all())
    assert per_channel or len(set(kept.scale.tolist())) == 1
    again = held.from_tensors(kind, stored)
    x = drawn(3, size[1], seed=1)
    for ops in (shelf.resolve("cpu"), shelf.resolve("cpu", dict.fromkeys(("quantize", f"{kind}_linear"), "torch"))):
        found = again.matmul(x, None, ops)
        torch.testing.assert_close(
            found, held.seen(again, x) @ again.dense().T, rtol=EXACT[kind], atol=EXACT[kind] * 10
        )
    assert given_scale >= 0 or held.seen(again, x) is x
    assert (held.wanted(again) is None) == (given_scale < 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("static", [False, True])
def test_what_a_norm_has_rounded_is_taken_as_it_is(kind: str, static: bool) -> None:
    kept = KINDS[kind].pack(drawn(9, 70), torch.float32, input_scale=0.02 if static else 0.0)
    ops, x, bias = shelf.resolve("cpu"), drawn(4, 70, 1), drawn(1, 9, 2)[0]
    wants = kept.wants
    rounded = Quantized(*ops.quantize(x, *wants), x.dtype)
    assert (rounded.scale is None) == static
    assert torch.equal(kept.matmul(rounded, bias, ops), kept.matmul(x, bias, ops))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_slice_is_the_slice_of_what_is_multiplied_with(kind: str) -> None:
    whole = KINDS[kind].pack(drawn(20, 60), torch.float32, input_scale=0.05)
    part = whole.slice([(2, 5), (11, 20)], (7, 50))
    assert torch.equal(part.dense(), torch.cat([whole.dense()[2:5, 7:50], whole.dense()[11:20, 7:50]]))
    assert part.input_scale is whole.input_scale
    assert torch.equal(held.from_tensors(kind, part.tensors()).dense(), part.dense())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_damage_is_named(kind: str) -> None:
    stored = KINDS[kind].pack(drawn(4, 30), torch.float32).tensors()
    wrong = {"scale": torch.ones(5), "input_scale": torch.ones(2), "weight": torch.zeros(4, 30)}
    for name, tensor in wrong.items():
        with pytest.raises(CorruptArtifact, match="damaged"):
            held.from_tensors(kind, stored | {name: tensor})
    with pytest.raises(KeyError):
        held.from_tensors(kind, {n: t for n, t in stored.items() if n != "input_scale"})


def test_weights_of_nothing_stay_nothing() -> None:
    for kind in KINDS.values():
        kept = kind.pack(torch.zeros(3, 8), torch.float32, per_channel=False)
        assert not kept.dense().any()
        assert replace(kept).scale.tolist() == [1.0] * 3

"""Ops that advance a recurrent state: chunks against single tokens, and how steps divide them."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.ops.gated_delta_rule import GatedDeltaInputs
from modelmill.ops.recurrent_metadata import (
    RecurrentSequence,
    RecurrentStepMetadata,
    chunk_size_for_page,
)
from modelmill.ops.ssd_scan import SSDScanInputs

HEADS, KEY_HEADS, DK, DV, COUNT = 4, 2, 12, 8, 70


def rows(first: int, count: int, *, chunk: int, keep: int = -1) -> RecurrentStepMetadata:
    """One sequence in slot 0 of 3; ``keep``: a snapshot behind so many tokens, in slot 1."""
    snapshot = torch.tensor([2 if keep < 0 else 1])
    positions = torch.arange(first, first + count)
    starts = torch.tensor([0, count], dtype=torch.int32)
    return RecurrentStepMetadata(
        starts, positions, torch.tensor([0]), snapshot, torch.tensor([keep]), count, chunk
    )


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


BACKENDS = ("torch", "triton", "cpu")


def run_op(op: str, backend: str, inputs: Any) -> torch.Tensor:
    """One backend's result; the test is skipped where it cannot run."""
    if backend == "torch":
        return registry.reference(op)(inputs)
    module = registry.implementation(op, backend)
    if module is None:
        pytest.skip(f"{backend} does not implement {op}")
    if (reason := module.unavailable_reason("cpu")) is not None:
        pytest.skip(reason)
    if not registry.backend_serves_args(op, backend, inputs):
        return registry.reference(op)(inputs)
    return module.run(inputs)


class Sequence:
    """A sequence's operands, computed in parts."""

    def __init__(self, chunk: int, backend: str = "torch") -> None:
        self.chunk = chunk
        self.backend = backend
        self.state = torch.full((3, HEADS, DK, DV), 7.0)  # a slot need not be cleared
        self.conv_state = torch.full((3, 3, 10), 7.0)
        self.qkv = draw(COUNT, 2 * KEY_HEADS * DK + HEADS * DV, seed=0)
        self.gates = draw(COUNT, 2 * HEADS, seed=1)
        self.a_log, self.dt_bias = draw(HEADS, seed=2) - 2, draw(HEADS, seed=3)
        self.x, self.weight = draw(COUNT, 12, seed=4), draw(10, 4, seed=5)

    def delta(self, first: int, stop: int, keep: int = -1) -> torch.Tensor:
        part = rows(first, stop - first, chunk=self.chunk, keep=keep)
        inputs = GatedDeltaInputs(
            self.qkv[first:stop], self.gates[first:stop], self.a_log, self.dt_bias, self.state, part
        )
        return run_op("gated_delta_rule", self.backend, inputs)

    def conv(self, first: int, stop: int, keep: int = -1) -> torch.Tensor:
        part = rows(first, stop - first, chunk=self.chunk, keep=keep)
        inputs = CausalConvInputs(self.x[first:stop], self.conv_state, self.weight, None, part)
        return run_op("causal_conv", self.backend, inputs)


def test_the_delta_rule_is_the_papers_recurrence() -> None:
    """S ← S α (I − β k kᵀ) + β v kᵀ in float64, keys and queries of length 1 (equation 10)."""
    seq = Sequence(chunk=1)
    out = seq.delta(0, COUNT)
    q, k, v = seq.qkv.double().split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV], 1)
    b, a = seq.gates.double().chunk(2, 1)
    decay = torch.exp(-seq.a_log.double().exp() * torch.log1p(torch.exp(a + seq.dt_bias)))
    for head in range(HEADS):
        channels = slice(head // 2 * DK, head // 2 * DK + DK)
        state = torch.zeros(DV, DK, dtype=torch.float64)
        for t in range(COUNT):
            key, query = (x[t, channels] / x[t, channels].norm() for x in (k, q))
            value, rate = v[t, head * DV : head * DV + DV], b[t, head].sigmoid()
            forget = torch.diag(torch.ones(DK)).double() - rate * torch.outer(key, key)
            state = decay[t, head] * state @ forget + rate * torch.outer(value, key)
            expected = state @ query / DK**0.5
            assert (out[t, head * DV : head * DV + DV] - expected).abs().max() < 1e-5
        assert (seq.state[0, head].T - state).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_chunks_compute_what_single_tokens_do(chunk: int) -> None:
    single, chunks = Sequence(chunk=1), Sequence(chunk=chunk)
    torch.testing.assert_close(chunks.delta(0, COUNT), single.delta(0, COUNT), rtol=0, atol=1e-5)
    torch.testing.assert_close(chunks.state[0], single.state[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["delta", "conv"])
@pytest.mark.parametrize("edges", [(0, 32, 70), (0, 8, 16, 64, 70), (0, 64, 65, 66, 70)])
def test_the_division_into_steps_changes_no_bit(
    op: str, edges: tuple[int, ...], backend: str
) -> None:
    """At multiples of a chunk, and by single tokens behind the last whole chunk."""
    whole, parts = Sequence(8, backend), Sequence(8, backend)
    expected = getattr(whole, op)(0, COUNT)
    actual = [getattr(parts, op)(*edge) for edge in pairwise(edges)]
    assert torch.equal(torch.cat(actual), expected)
    state = "state" if op == "delta" else "conv_state"
    assert torch.equal(getattr(parts, state)[0], getattr(whole, state)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["delta", "conv"])
@pytest.mark.parametrize("keep", [0, 8, 40, 64, 70])
def test_a_snapshot_is_the_state_behind_its_tokens(op: str, keep: int, backend: str) -> None:
    whole, part = Sequence(8, backend), Sequence(8, backend)
    state = "state" if op == "delta" else "conv_state"
    getattr(whole, op)(0, COUNT, keep)
    snapshot = getattr(whole, state)[1]
    if keep:
        getattr(part, op)(0, keep)
        assert torch.equal(snapshot, getattr(part, state)[0])
    else:
        assert not snapshot.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_between_chunks_changes_no_bit(backend: str) -> None:
    """The chunks behind it are computed as chunks, too."""
    seq, without = Sequence(8, backend), Sequence(8, backend)
    assert torch.equal(seq.delta(0, COUNT, 24), without.delta(0, COUNT))
    assert torch.equal(seq.state[0], without.state[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["delta", "conv"])
def test_decodes_of_a_batch_are_those_of_single_sequences(op: str, backend: str) -> None:
    """Three sequences at once; the second keeps a snapshot, the third one of its first state."""
    seq = Sequence(8, backend)
    name = "state" if op == "delta" else "conv_state"
    states = draw(6, *getattr(seq, name).shape[1:], seed=9)
    padding, batch = 5, states.clone()
    several = RecurrentStepMetadata(
        torch.arange(4, dtype=torch.int32), torch.tensor([0, 15, 24]), torch.tensor([2, 0, 1]),
        torch.tensor([padding, 3, 4]), torch.tensor([-1, 16, 24]), 1, 8,
    )  # fmt: skip
    out = run_decode(op, seq, batch, several, [0, 1, 2])
    for i, (first, slot) in enumerate(((0, 2), (15, 0), (24, 1))):
        alone = states.clone()
        one = several._replace(
            query_start=several.query_start[:2], positions=torch.tensor([first]),
            slots=torch.tensor([slot]), snapshot_slots=torch.tensor([padding]),
            snapshot_ends=torch.tensor([-1]),
        )  # fmt: skip
        assert torch.equal(out[i : i + 1], run_decode(op, seq, alone, one, [i]))
        assert torch.equal(batch[slot], alone[slot])
    assert torch.equal(batch[3], batch[0])
    assert torch.equal(batch[4], states[1])


def run_decode(
    op: str, seq: Sequence, state: torch.Tensor, part: RecurrentStepMetadata, tokens: list[int]
) -> Any:
    if op == "conv":
        inputs = CausalConvInputs(seq.x[tokens], state, seq.weight, None, part)
        return run_op("causal_conv", seq.backend, inputs)
    delta = GatedDeltaInputs(
        seq.qkv[tokens], seq.gates[tokens], seq.a_log, seq.dt_bias, state, part
    )
    return run_op("gated_delta_rule", seq.backend, delta)


def test_parts_of_a_sequence() -> None:
    seq = RecurrentSequence(start=10, stop=40, first=5, slot=0, snapshot_slot=1, snapshot_end=24)
    parts = list(seq.whole_and_partial_chunk_ranges(8))  # positions 5 … 34: whole chunks are 8 … 31
    assert parts == [(10, 13), (13, 29), (29, 37), (37, 40)]
    assert [seq.has_only_whole_chunks(part, 8) for part in parts] == [False, True, True, False]
    assert [chunk_size_for_page(size) for size in (8, 16, 64, 128, 24)] == [8, 16, 64, 64, 8]


SSM_HEADS, GROUPS, P, N = 4, 2, 8, 12


def scan(
    chunk: int, edges: tuple[int, ...], state: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """Mamba2's recurrence over one sequence, in steps between the edges."""
    xbc = draw(COUNT, SSM_HEADS * P + 2 * GROUPS * N, seed=1)
    dt, a_log, bias, skip = (draw(*s, seed=i) for i, s in enumerate(((COUNT, 4), (4,), (4,), (4,))))
    return torch.cat(
        [
            run_op(
                "ssd_scan", backend, SSDScanInputs(
                    xbc[first:stop], dt[first:stop], a_log, bias, skip, (0.1, 2.0), state,
                    rows(first, stop - first, chunk=chunk),
                )
            )
            for first, stop in pairwise(edges)
        ]
    )  # fmt: skip


def test_the_state_space_recurrence_is_the_papers() -> None:
    """h ← exp(Δ A) h + Δ B xᵀ, y = Cᵀ h + D x in float64 (equations 2 and 3)."""
    state = torch.full((3, SSM_HEADS, P, N), 7.0)
    out = scan(1, (0, COUNT), state)
    xbc = draw(COUNT, SSM_HEADS * P + 2 * GROUPS * N, seed=1).double()
    dt, a_log, bias, skip = (
        draw(*s, seed=i).double() for i, s in enumerate(((COUNT, 4), (4,), (4,), (4,)))
    )
    x, b, c = xbc.split([SSM_HEADS * P, GROUPS * N, GROUPS * N], 1)
    step = torch.log1p(torch.exp(dt + bias)).clamp(0.1, 2.0)
    for head in range(SSM_HEADS):
        own, shared = slice(head * P, head * P + P), slice(head // 2 * N, head // 2 * N + N)
        h = torch.zeros(N, P, dtype=torch.float64)
        for t in range(COUNT):
            delta = step[t, head]
            h = torch.exp(-delta * a_log[head].exp()) * h
            h += delta * torch.outer(b[t, shared], x[t, own])
            expected = c[t, shared] @ h + skip[head] * x[t, own]
            assert (out[t, own] - expected).abs().max() < 2e-5
        assert (state[0, head].T - h).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [8, 64])
def test_chunks_of_the_scan_compute_what_single_tokens_do(chunk: int) -> None:
    single, chunks = (torch.full((3, SSM_HEADS, P, N), 7.0) for _ in range(2))
    expected = scan(1, (0, COUNT), single)
    torch.testing.assert_close(scan(chunk, (0, COUNT), chunks), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(chunks[0], single[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edges", [(0, 32, 70), (0, 8, 16, 64, 70), (0, 64, 65, 66, 70)])
def test_the_division_of_a_scan_into_steps_changes_no_bit(
    edges: tuple[int, ...], backend: str
) -> None:
    whole, parts = (torch.full((3, SSM_HEADS, P, N), 7.0) for _ in range(2))
    assert torch.equal(scan(8, edges, parts, backend), scan(8, (0, COUNT), whole, backend))
    assert torch.equal(parts[0], whole[0])


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("op", ["causal_conv", "gated_delta_rule", "ssd_scan"])
def test_a_kernel_leaves_the_states_of_the_reference(op: str, backend: str) -> None:
    """Of its cases: the states of all slots and the snapshots, which outputs do not show."""
    kernel, reference = registry.implementations(op)[backend], registry.reference(op)
    if (reason := kernel.unavailable_reason("cpu")) is not None:
        pytest.skip(reason)
    for case in import_module(f"modelmill.ops.{op}").cases("cpu", torch.float32):
        states = []
        for run in (kernel.run, reference):
            args = case.args | {"state": case.args["state"].clone()}
            registry.adapt_to_named_args(op, run)(**args)
            states.append(args["state"][:-1])  # the last slot is padding
        torch.testing.assert_close(*states, rtol=0, atol=1e-5)


MIXED_STEPS = {  # three sequences: a prompt of whole chunks, a decode, a prompt around one chunk
    "gated_delta_rule": ((24, 1, 13), 1, 2, 16, 24),
    "ssd_scan": ((24, 1, 13), 1, 2, 24, 16),
}


def mixed_step(op: str) -> dict[str, Any]:
    """Arguments in bfloat16, with three rows of padding behind the last sequence."""
    module = import_module(f"modelmill.ops.{op}")
    (case,) = module.cases_for_shapes([MIXED_STEPS[op]], "cpu", torch.bfloat16, chunk=8)
    args = dict(case.args)
    starts = args["rows"].query_start
    args["rows"] = args["rows"]._replace(query_start=starts - starts.eq(starts[-1]) * 3)
    return args


def run_mixed(op: str, run: Any, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the states of all slots but the padding."""
    args = args | {"state": args["state"].clone()}
    out = registry.adapt_to_named_args(op, run)(**args)
    return out, args["state"][:-1]


@pytest.mark.parametrize("op", MIXED_STEPS)
def test_chunks_of_bfloat16_round_outputs_to_it_and_states_less(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64; no output is left unwritten, and those of padding are zeros."""
    kernel = registry.implementations(op)["triton"]
    if (reason := kernel.unavailable_reason("cpu")) is not None:
        pytest.skip(reason)
    args, empty = mixed_step(op), torch.empty
    exact = args | {"state": args["state"].double()}
    expected, expected_states = run_mixed(op, registry.reference(op), exact)

    def poisoned(*shape: Any, **named: Any) -> torch.Tensor:
        made = empty(*shape, **named)
        return made.fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)
    out, states = run_mixed(op, kernel.run, args)
    tokens = int(args["rows"].query_start[-1])
    assert not out[tokens:].any()
    assert relative(out[:tokens], expected[:tokens]) < 2**-8
    assert relative(states, expected_states) < 2**-11


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance in relation to the length of what is expected."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("op", MIXED_STEPS)
def test_the_place_of_a_chunk_in_a_step_changes_no_bit(op: str) -> None:
    """In bfloat16: its sequence alone, behind other sequences, or divided into two steps."""
    kernel = registry.implementations(op)["triton"]
    if (reason := kernel.unavailable_reason("cpu")) is not None:
        pytest.skip(reason)
    args = mixed_step(op)
    out, states = run_mixed(op, kernel.run, args)
    tokens = "qkv" if op == "gated_delta_rule" else "xbc"
    gates = "gates" if op == "gated_delta_rule" else "dt"
    parts, state = [], args["state"].clone()
    for first, stop in ((0, 16), (16, 24)):
        step = rows(first, stop - first, chunk=8)
        step = step._replace(slots=args["rows"].slots[:1], snapshot_slots=torch.tensor([6]))
        part = args | {"rows": step, "state": state}
        part |= {tokens: args[tokens][first:stop], gates: args[gates][first:stop]}
        parts.append(registry.adapt_to_named_args(op, kernel.run)(**part))
    slot = args["rows"].slots[0]
    assert torch.equal(torch.cat(parts), out[:24])
    assert torch.equal(state[slot], states[slot])

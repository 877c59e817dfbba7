"""Weights expanded once where no compiled kernel serves them: the same bits, counted memory, one line for people."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelmill.nn.decoder import Decoder
from modelmill.nn.linear import Linear
from modelmill.ops import shelf
from modelmill.ops.cpu import build
from modelmill.ops.eight_bit import EXACT_COLUMNS, integer_sums
from modelmill.runtime import expand, memory
from modelmill.weights import held, int8_group
from modelmill.weights.held import Expanded, HeldWeight
from modelmill.weights.stacked import Held as Stacked
from tests.runtime import tiny

TORCH = shelf.resolve("cpu", {op: "torch" for op in shelf.OPS if "cpu" in shelf.variants(op)})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "int4": ("int4", {"group": 32}),
    "int4 symmetric": ("int4", {"group": 64, "symmetric": True}),
    "w8a8": ("w8a8", {}),
    "w8a8 static": ("w8a8", {"input_scale": 0.03}),
    "w8a8 floats": ("w8a8", {"input_scale": -1.0}),
    "fp8": ("fp8", {}),
    "fp8 static": ("fp8", {"input_scale": 0.03}),
    "fp8 floats": ("fp8", {"input_scale": -1.0}),
    "rptq 8": ("clustered", {}),
    "rptq 4": ("clustered", {"weight_bits": 4, "bits": 4}),
    "rptq folded": ("clustered", {"mode": "folded"}),
}


def _weight(name: str, rows: int, columns: int, dtype: torch.dtype) -> HeldWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    wide = torch.randn(rows, columns, generator=generator) * columns**-0.5
    if name == "int8 groups":
        codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        scale = torch.rand(rows, -(-columns // 32), generator=generator).half() * 0.01
        return int8_group.Held.from_codes(codes, scale, scale * 3, 32)
    if name == "int4 reordered":
        order = torch.randperm(columns, generator=generator).int()
        return replace(held.pack("int4", wide[:, order.long()], dtype, group=32), order=order)  # type: ignore[type-var]
    if name == "stacked":
        return Stacked((held.pack("int8", wide[: rows // 2], dtype), held.pack("int4", wide[rows // 2 :], dtype)))
    kind, layout = LAYOUTS[name]
    return held.pack(kind, wide, dtype, **layout)


def _expanded(weight: HeldWeight, dtype: torch.dtype, room: int = 1 << 40) -> HeldWeight:
    model = torch.nn.Module()
    model.linear = Linear(weight.shape[1], weight.shape[0])
    model.linear.held = weight
    expand.expand(model, TORCH, dtype, room)
    return model.linear.held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [96, 172, 2100])
@pytest.mark.parametrize("name", [*LAYOUTS, "int8 groups", "int4 reordered", "stacked"])
def test_expanded_once_gives_the_same_bits(name: str, columns: int, dtype: torch.dtype) -> None:
    weight = _weight(name, 40, columns, dtype)
    wide = _expanded(weight, dtype)
    assert held.expanded_tensors(wide), "something is expanded"
    assert (wide.kind, wide.shape, wide.grain) == (weight.kind, weight.shape, weight.grain)
    same = [a.data_ptr() == b.data_ptr() for a, b in zip(wide.tensors().values(), weight.tensors().values())]
    assert sum(same) >= len(same) - 1, "all but the sizes, which are made of numbers"
    bias = torch.linspace(-1, 1, 40).to(dtype)
    for rows in (1, 3, 40):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        for added in (None, bias):
            torch.testing.assert_close(
                wide.matmul(x, added, TORCH), weight.matmul(x, added, TORCH), rtol=0, atol=0, equal_nan=True
            )
        assert torch.equal(held.seen(wide, x), held.seen(weight, x))
    torch.testing.assert_close(wide.dense(), weight.dense(), rtol=0, atol=0)


class _Copies(TorchDispatchMode):
    """Shapes of the tensors that are converted or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.repeat_interleave):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["int8", "int4", "int8 groups", "w8a8", "fp8", "rptq 8"])
def test_no_weight_is_converted_in_a_step(name: str) -> None:
    packed = _weight(name, 512, 96, torch.bfloat16)
    counts = []
    for weight in (packed, _expanded(packed, torch.bfloat16)):
        with _Copies() as copies:
            weight.matmul(torch.ones(1, 96, dtype=torch.bfloat16), None, TORCH)
        counts.append(sum(512 in shape and shape.numel() >= 512 * 32 for shape in copies.shapes))
    assert counts[0] > 0, "else the test would see nothing"
    assert counts[1] == 0


def test_integer_sums_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((3, 5 * EXACT_COLUMNS + 7), -128, dtype=torch.int8)
    w = torch.full((4, x.shape[1]), -128, dtype=torch.int8)
    x[1] = torch.randint(-128, 128, (x.shape[1],), generator=generator)
    wanted = x.long() @ w.long().T
    for weight in (w, w.float()):
        assert torch.equal(integer_sums(x, weight).long(), wanted)
    # without the cut at EXACT_COLUMNS float32 would round these
    odd = torch.ones_like(x)
    odd[:, 0] = 127
    assert torch.equal(integer_sums(odd, w.float()).long(), odd.long() @ w.long().T)


def _int8_model() -> Decoder:
    model = tiny.decoder()
    for module in model.modules():
        if isinstance(module, Linear):
            module.held = held.pack("int8", module.held.dense(), torch.float32)
    return model


def test_where_memory_ends_weights_stay_packed_and_a_line_says_so() -> None:
    model = _int8_model()
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    before = memory.weight_bytes(model)
    room = sum(4 * m.shape[0] * m.shape[1] for m in linears[:3])
    done = expand.expand(model, TORCH, torch.float32, room)
    assert [isinstance(m.held, Expanded) for m in linears] == [True] * 3 + [False] * (len(linears) - 3)
    assert (done.weights, done.packed, done.bytes) == (3, len(linears) - 3, room)
    assert memory.weight_bytes(model) == before + room
    assert done.note is not None
    assert f"{done.packed} of {len(linears)} weights" in done.note
    assert "\n" not in done.note
    assert expand.expand(model, TORCH, torch.float32, 1 << 40).note is None


def test_a_tied_weight_is_expanded_once() -> None:
    weight = held.pack("int8", torch.randn(8, 32), torch.float32)
    model = torch.nn.ModuleList([Linear(32, 8), Linear(32, 8)])
    for linear in model:
        linear.held = held.from_tensors("int8", weight.tensors())  # type: ignore[union-attr]
    assert expand.expand(model, TORCH, torch.float32, 1 << 40).weights == 1
    assert model[0].held.wide is model[1].held.wide  # type: ignore[union-attr]


def test_a_loop_without_kernels_says_so_once_and_expands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "load", lambda: "no C++ compiler is here; install g++")
    with monkeypatch.context() as packed:
        packed.setattr(expand, "EXPANDED_SHARE", 0.0)
        wanted = tiny.run(tiny.loop(_int8_model()), tiny.requests(tiny.prompts(3)))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "modelmill"):
        loop = tiny.loop(_int8_model())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "no compiled CPU kernels" in lines[0]
    assert "install g++" in lines[0]
    held_by = [m.held for m in loop.model.modules() if isinstance(m, Linear)]
    assert all(isinstance(weight, Expanded) for weight in held_by)
    assert tiny.run(loop, tiny.requests(tiny.prompts(3))) == wanted


def test_a_small_machine_is_told_what_stays_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "load", lambda: "no C++ compiler is here; install g++")
    monkeypatch.setattr(expand, "EXPANDED_SHARE", 0.0)
    with caplog.at_level(logging.WARNING, "modelmill"):
        expand.prepare_weights(_int8_model(), TORCH, torch.float32, "cpu")
    assert [("no compiled" in line, "unpacked anew" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]

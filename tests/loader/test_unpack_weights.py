"""Weights expanded once where no compiled kernel serves them: the same bits, counted memory, one
line for people.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelmill.loader import capacity, unpack_weights
from modelmill.nn.decoder import Decoder
from modelmill.nn.latent_attention import LatentAttentionCore
from modelmill.nn.linear import Linear
from modelmill.ops import int8_linear, registry
from modelmill.ops.cpu.common import build
from modelmill.ops.int8_linear import INT8PACK_MM_MAX_ROWS, supports_int8pack_mm, uses_int8pack_mm
from modelmill.ops.quant_types import MAX_EXACT_FLOAT32_PRODUCTS, exact_int_matmul
from modelmill.weights import base, int8_group
from modelmill.weights.base import PackedAndUnpackedWeight, WeightFormat
from modelmill.weights.mixed_rows import MixedRowsWeight
from tests.nn.test_latent_attention import make_core
from tests.runtime import tiny

TORCH = registry.select_backends(
    "cpu", {op: "torch" for op in registry.op_names() if "cpu" in registry.implementations(op)}
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "int4": ("int4", {"group_size": 32}),
    "int4 symmetric": ("int4", {"group_size": 64, "symmetric": True}),
    "w8a8": ("w8a8", {}),
    "w8a8 static": ("w8a8", {"input_scale": 0.03}),
    "w8a8 floats": ("w8a8", {"input_scale": -1.0}),
    "fp8": ("fp8", {}),
    "fp8 static": ("fp8", {"input_scale": 0.03}),
    "fp8 floats": ("fp8", {"input_scale": -1.0}),
    "rptq 8": ("rptq", {}),
    "rptq 4": ("rptq", {"weight_bits": 4, "bits": 4}),
    "rptq folded": ("rptq", {"mode": "folded"}),
}


def _weight(name: str, rows: int, columns: int, dtype: torch.dtype) -> WeightFormat:
    generator = torch.Generator().manual_seed(rows + columns)
    wide = torch.randn(rows, columns, generator=generator) * columns**-0.5
    if name == "int8 groups":
        codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        scale = torch.rand(rows, -(-columns // 32), generator=generator).half() * 0.01
        return int8_group.Int8GroupWeight.from_codes(codes, scale, scale * 3, 32)
    if name == "int4 reordered":
        perm = torch.randperm(columns, generator=generator).int()
        return replace(
            base.pack_as_format("int4", wide[:, perm.long()], dtype, group_size=32), perm=perm
        )  # type: ignore[type-var]
    if name == "mixed_rows":
        return MixedRowsWeight(
            (
                base.pack_as_format("int8", wide[: rows // 2], dtype),
                base.pack_as_format("int4", wide[rows // 2 :], dtype),
            )
        )
    weight_format, layout = LAYOUTS[name]
    return base.pack_as_format(weight_format, wide, dtype, **layout)


def _unpacked(weight: WeightFormat, dtype: torch.dtype, room: int = 1 << 40) -> WeightFormat:
    model = torch.nn.Module()
    model.linear = Linear(weight.shape[1], weight.shape[0])
    model.linear.weight = weight
    unpack_weights.unpack_weights(model, TORCH, dtype, room)
    return model.linear.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [96, 172, 2100])
@pytest.mark.parametrize("name", [*LAYOUTS, "int8 groups", "int4 reordered", "mixed_rows"])
def test_expanded_once_gives_the_same_bits(name: str, columns: int, dtype: torch.dtype) -> None:
    weight = _weight(name, 40, columns, dtype)
    wide = _unpacked(weight, dtype)
    assert wide.extra_unpacked_tensors(), "something is expanded"
    assert (wide.format, wide.shape, wide.column_slice_alignment) == (
        weight.format,
        weight.shape,
        weight.column_slice_alignment,
    )
    same = [
        a.data_ptr() == b.data_ptr()
        for a, b in zip(wide.tensors().values(), weight.tensors().values())
    ]
    assert sum(same) >= len(same) - 1, "all but the sizes, which are made of numbers"
    bias = torch.linspace(-1, 1, 40).to(dtype)
    for rows in (1, 3, 40):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        for added in (None, bias):
            torch.testing.assert_close(
                wide.matmul(x, added, TORCH),
                weight.matmul(x, added, TORCH),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
        assert torch.equal(wide.fake_quantize_input(x), weight.fake_quantize_input(x))
    torch.testing.assert_close(wide.dequantize(), weight.dequantize(), rtol=0, atol=0)


class _Copies(TorchDispatchMode):
    """Shapes of the tensors that are converted or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten._to_copy,
            torch.ops.aten.clone,
            torch.ops.aten.repeat_interleave,
        ):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["int8", "int4", "int8 groups", "w8a8", "fp8", "rptq 8"])
def test_no_weight_is_converted_in_a_step(name: str) -> None:
    packed = _weight(name, 512, 96, torch.bfloat16)
    counts = []
    for weight in (packed, _unpacked(packed, torch.bfloat16)):
        with _Copies() as copies:
            weight.matmul(
                torch.ones(INT8PACK_MM_MAX_ROWS + 1, 96, dtype=torch.bfloat16), None, TORCH
            )
        counts.append(sum(512 in shape and shape.numel() >= 512 * 32 for shape in copies.shapes))
    assert counts[0] > 0, "else the test would see nothing"
    assert counts[1] == 0


@pytest.mark.skipif(
    not supports_int8pack_mm(96),
    reason="torch has no fast product with packed int8 on this processor",
)
def test_few_rows_read_int8_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = _weight("int8", 33, 96, torch.bfloat16)
    x = torch.randn(INT8PACK_MM_MAX_ROWS, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    with monkeypatch.context() as widening:
        widening.setattr(int8_linear, "_int8pack_mm_usable", lambda: False)
        expected = packed.matmul(x, None, TORCH)
    for weight in (packed, _unpacked(packed, torch.bfloat16)):
        with monkeypatch.context() as alone:
            alone.setattr(int8_linear, "linear", None)
            together = weight.matmul(x, None, TORCH)
            assert torch.equal(
                torch.cat([weight.matmul(row[None], None, TORCH) for row in x]), together
            )
        torch.testing.assert_close(together, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("columns", [33, 40, 48])
def test_rows_that_vectors_would_read_beyond_are_widened(columns: int) -> None:
    assert not uses_int8pack_mm(torch.ones(1, columns, dtype=torch.bfloat16))
    weight = base.pack_as_format("int8", torch.randn(7, columns), torch.bfloat16)
    assert _unpacked(weight, torch.bfloat16).unpacked.packed is None  # type: ignore[attr-defined]


def test_torch_without_the_private_product_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert not int8_linear._int8pack_mm_usable.__wrapped__()


def test_integer_sums_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((3, 5 * MAX_EXACT_FLOAT32_PRODUCTS + 7), -128, dtype=torch.int8)
    w = torch.full((4, x.shape[1]), -128, dtype=torch.int8)
    x[1] = torch.randint(-128, 128, (x.shape[1],), generator=generator)
    expected = x.long() @ w.long().T
    for weight in (w, w.float()):
        assert torch.equal(exact_int_matmul(x, weight).long(), expected)
    # without the cut at MAX_EXACT_FLOAT32_PRODUCTS float32 would round these
    odd = torch.ones_like(x)
    odd[:, 0] = 127
    assert torch.equal(exact_int_matmul(odd, w.float()).long(), odd.long() @ w.long().T)


def _int8_model() -> Decoder:
    model = tiny.decoder()
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight = base.pack_as_format("int8", module.weight.dequantize(), torch.float32)
    return model


def test_where_memory_ends_weights_stay_packed_and_a_line_says_so() -> None:
    model = _int8_model()
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    before = capacity.weight_bytes(model)
    room = sum(4 * m.shape[0] * m.shape[1] for m in linears[:3])
    done = unpack_weights.unpack_weights(model, TORCH, torch.float32, room)
    assert [isinstance(m.weight, PackedAndUnpackedWeight) for m in linears] == [True] * 3 + [
        False
    ] * (len(linears) - 3)
    assert (done.num_unpacked, done.num_packed, done.unpacked_bytes) == (3, len(linears) - 3, room)
    assert capacity.weight_bytes(model) == before + room
    assert done.still_packed_warning is not None
    assert f"{done.num_packed} of {len(linears)} weights" in done.still_packed_warning
    assert "\n" not in done.still_packed_warning
    assert (
        unpack_weights.unpack_weights(model, TORCH, torch.float32, 1 << 40).still_packed_warning
        is None
    )


def test_a_tied_weight_is_expanded_once() -> None:
    weight = base.pack_as_format("int8", torch.randn(8, 32), torch.float32)
    model = torch.nn.ModuleList([Linear(32, 8), Linear(32, 8)])
    for linear in model:
        linear.weight = base.from_tensors("int8", weight.tensors())  # type: ignore[union-attr]
    assert unpack_weights.unpack_weights(model, TORCH, torch.float32, 1 << 40).num_unpacked == 1
    assert model[0].weight.unpacked is model[1].weight.unpacked  # type: ignore[union-attr]


def test_a_loop_without_kernels_says_so_once_and_expands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        build, "load_or_compile_library", lambda: "no C++ compiler is here; install g++"
    )
    with monkeypatch.context() as packed:
        packed.setattr(unpack_weights, "UNPACKED_MEMORY_FRACTION", 0.0)
        expected = tiny.run(tiny.make_engine(_int8_model()), tiny.requests(tiny.prompts(3)))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "modelmill"):
        engine_core = tiny.make_engine(_int8_model())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "no compiled CPU kernels" in lines[0]
    assert "install g++" in lines[0]
    weights = [m.weight for m in engine_core.model.modules() if isinstance(m, Linear)]
    assert all(isinstance(weight, PackedAndUnpackedWeight) for weight in weights)
    assert tiny.run(engine_core, tiny.requests(tiny.prompts(3))) == expected


def test_a_small_machine_reports_what_stays_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        build, "load_or_compile_library", lambda: "no C++ compiler is here; install g++"
    )
    monkeypatch.setattr(unpack_weights, "UNPACKED_MEMORY_FRACTION", 0.0)
    with caplog.at_level(logging.WARNING, "modelmill"):
        unpack_weights.unpack_weights_without_kernels(_int8_model(), TORCH, torch.float32)
    assert [("no compiled" in line, "unpacked again" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_up_projections_of_latent_attention_are_packed_when_an_engine_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory for the KV cache is measured behind that."""
    packed: list[LatentAttentionCore] = []
    monkeypatch.setattr(
        LatentAttentionCore, "packed_up_projections", lambda core: packed.append(core)
    )
    model = torch.nn.Sequential(make_core())
    unpack_weights.unpack_weights_without_kernels(model, TORCH, torch.bfloat16)
    assert packed == [*model]

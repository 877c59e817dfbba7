"""RPTQ weights as they are stored, cut for ranks and damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import CorruptArtifact, UsageError
from modelmill.nn.layer_spec import QuantSiteSpec
from modelmill.ops import registry
from modelmill.ops.quant_types import QuantizedInput
from modelmill.ops.rms_norm_quant import rms_norm_quant
from modelmill.quant.recipe import InputStatistics
from modelmill.quant.rptq import RptqRecipe
from modelmill.weights._rptq_columns import rptq_group_width_and_count
from modelmill.weights.base import PackedAndUnpackedWeight, from_tensors, packed_tensor_specs
from modelmill.weights.rptq import RptqWeight

BITS_AND_MODES = [
    (bits, mode) for bits in ("w8a8", "w4a8", "w4a4") for mode in ("exact", "folded", "dynamic")
]


def _make_weight(
    bits: str, mode: str, columns: int = 100, rows: int = 24, splits: int = 1,
    *, fallback: bool | None = None,
) -> tuple[RptqWeight, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weight, its dense original, inputs). fallback: None is the recipe's own choice."""
    generator = torch.Generator().manual_seed(columns)
    x = (
        torch.randn(200, columns, generator=generator)
        * torch.rand(columns, generator=generator).exp()
    )
    x[:, 5 % columns] *= 20
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    size = x.abs()
    statistics = InputStatistics(
        200, x.T @ x / 200, size.mean(0), size.amax(0), x.amin(0), x.amax(0), x[:100]
    )
    made = RptqRecipe(
        BuildConfig(quantization="rptq", bits=bits, mode=mode, splits_per_channel=splits)
    ).module_recipe("layers.0.mlp.down_proj", QuantSiteSpec("down", heavy_tailed=True))
    made.fallback = made.fallback if fallback is None else fallback
    rptq_weight = made.quantize(weight, statistics)
    assert isinstance(rptq_weight, RptqWeight)
    return rptq_weight, weight, x


@pytest.mark.parametrize(("bits", "mode"), BITS_AND_MODES)
def test_what_is_announced_is_stored_and_read_back(bits: str, mode: str) -> None:
    rptq_weight, _, x = _make_weight(bits, mode)
    layout = RptqRecipe(BuildConfig(quantization="rptq", bits=bits, mode=mode)).pack_options
    announced = packed_tensor_specs("rptq", rptq_weight.shape, torch.float32, **layout)
    stored = rptq_weight.tensors()
    assert list(announced) == list(stored)
    assert {n: (tuple(t.shape), t.dtype) for n, t in stored.items()} == announced
    again = from_tensors("rptq", stored)
    ops = registry.select_backends("cpu")
    assert torch.equal(again.matmul(x, None, ops), rptq_weight.matmul(x, None, ops))


@pytest.mark.parametrize(("bits", "most"), [("w8a8", 0.02), ("w4a8", 0.12), ("w4a4", 0.25)])
@pytest.mark.parametrize("mode", ["exact", "dynamic"])
def test_outputs_are_near_those_of_the_weight(bits: str, mode: str, most: float) -> None:
    rptq_weight, weight, x = _make_weight(bits, mode)
    expected = x @ weight.T
    off = rptq_weight.matmul(x, None, registry.select_backends("cpu")) - expected
    assert float(off.norm() / expected.norm()) < most


@pytest.mark.parametrize(("bits", "mode"), BITS_AND_MODES)
def test_parts_of_ranks_add_up(bits: str, mode: str) -> None:
    """Columns cut anywhere, rows in stretches: the parts' products sum up to the whole."""
    rptq_weight, _, x = _make_weight(bits, mode)
    ops = registry.select_backends("cpu")
    expected = rptq_weight.matmul(x, None, ops)
    parts = [rptq_weight.slice([(0, 24)], cut) for cut in ((0, 37), (37, 100))]
    summed = sum(
        part.matmul(x[:, a:b], None, ops)
        for part, (a, b) in zip(parts, ((0, 37), (37, 100)), strict=True)
    )
    # a token's own steps see fewer channels in a part; with the fallback a few tokens have such
    tolerance = 0.3 if mode == "dynamic" else 5e-3 if rptq_weight.fallback else 1e-5
    assert float((summed - expected).abs().max()) <= tolerance * float(expected.abs().max())
    some = rptq_weight.slice([(2, 5), (20, 24)], (0, 100)).matmul(x, None, ops)
    assert torch.allclose(some, torch.cat([expected[:, 2:5], expected[:, 20:24]], 1), atol=1e-6)


def _beyond_the_range(x: torch.Tensor) -> torch.Tensor:
    """The inputs with three rows several times as large as any of calibration."""
    out = x.clone()
    out[[3, 50, 120]] *= torch.tensor([2.5, 6.0, 40.0])[:, None]
    return out


@pytest.mark.parametrize("bits", ["w8a8", "w4a8"])
@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_a_row_beyond_the_static_range_is_rescaled_not_clipped(bits: str, mode: str) -> None:
    rptq_weight, weight, x = _make_weight(bits, mode)
    clipping = replace(rptq_weight, fallback=False)
    assert rptq_weight.fallback
    ops, far = registry.select_backends("cpu"), _beyond_the_range(x)
    expected = far @ weight.T
    outside = rptq_weight.input_row_outside_range_mask(far)
    assert outside is not None
    assert outside[[3, 50, 120]].all()
    unpacked = PackedAndUnpackedWeight(rptq_weight, rptq_weight.unpack(torch.float32))
    assert torch.equal(unpacked.input_row_outside_range_mask(far), outside)
    error, clipped = (
        (each.matmul(far, None, ops) - expected)[outside].norm(dim=1)
        / expected[outside].norm(dim=1)
        for each in (rptq_weight, clipping)
    )
    assert float(error.max()) < (0.03 if bits == "w8a8" else 0.35)
    assert float(clipped.max()) > 0.5
    _, step = ops.rptq_quant(rptq_weight._quant_inputs(far))
    unchanged = (step == rptq_weight.input_scales).all(1)
    assert int(unchanged.sum()) > 100
    assert torch.equal(*(w.matmul(far, None, ops)[unchanged] for w in (rptq_weight, clipping)))


def test_the_fallback_is_stored_and_older_weights_clip() -> None:
    rptq_weight, _, x = _make_weight("w8a8", "exact")
    stored, ops = rptq_weight.tensors(), registry.select_backends("cpu")
    assert stored["sizes"].tolist() == [100, 32, 8, 1]
    older = from_tensors("rptq", stored | {"sizes": stored["sizes"][:3]})
    far = _beyond_the_range(x)
    clipped = replace(rptq_weight, fallback=False).matmul(far, None, ops)
    assert torch.equal(older.matmul(far, None, ops), clipped)
    assert not torch.equal(rptq_weight.matmul(far, None, ops), clipped)
    for wrong in ([100, 32, 8, 2], [100, 32, 8, 1, 1], [100, 32]):
        with pytest.raises(CorruptArtifact, match="rebuild"):
            from_tensors("rptq", stored | {"sizes": torch.tensor(wrong, dtype=torch.int32)})


def test_rows_outside_the_range_of_split_channels() -> None:
    """Only the ends of a channel's columns are ends of its range."""
    rptq_weight, _, x = _make_weight("w8a8", "exact", columns=300, splits=3)
    assert not rptq_weight.fallback
    outside = rptq_weight.input_row_outside_range_mask(torch.cat([x, 100 * x[:20]]))
    assert outside is not None
    assert outside[-20:].all()
    assert not outside[:-20].any()
    assert _make_weight("w8a8", "dynamic")[0].input_row_outside_range_mask(x) is None


def test_a_norm_puts_out_what_the_product_wants() -> None:
    rptq_weight, _, x = _make_weight("w8a8", "exact")
    assert rptq_weight.input_quant_spec is None, "a fused norm has no steps of a token and group"
    rptq_weight = replace(rptq_weight, fallback=False)
    assert rptq_weight.input_quant_spec is not None
    norm = torch.rand(100) + 0.5
    ops = registry.select_backends("cpu")
    values, scale = rms_norm_quant(x, norm, 1e-5, rptq_weight.input_quant_spec)
    fused = rptq_weight.matmul(QuantizedInput(values, scale, x.dtype), None, ops)
    assert torch.equal(
        fused, rptq_weight.matmul(ops.rms_norm(x, norm, 1e-5), None, ops)
    ) or torch.allclose(
        fused, rptq_weight.matmul(ops.rms_norm(x, norm, 1e-5), None, ops), atol=0.05
    )
    assert _make_weight("w8a8", "dynamic")[0].input_quant_spec is None


def test_a_gate_is_taken_in_the_same_pass() -> None:
    rptq_weight, _, x = _make_weight("w4a4", "exact")
    ops = registry.select_backends("cpu")
    both = torch.cat([x, x.flip(0)], 1)
    apart = rptq_weight.matmul(ops.silu_mul(both), None, ops)
    off = (rptq_weight.try_swiglu_quant_linear(both, None, ops) - apart).norm() / apart.norm()
    assert float(off) < 0.01  # a value at the border of two integers may fall to either


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 576, 1536, 2048, 4096, 11008])
@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_groups_hold_every_channel(columns: int, mode: str) -> None:
    group, groups = rptq_group_width_and_count(columns, mode)
    assert group % 32 == 0
    assert group * groups >= columns
    if columns >= 4096:  # what is stored beside the channels
        assert group * groups <= 1.07 * columns


def test_damage_is_named() -> None:
    stored = _make_weight("w4a8", "exact")[0].tensors()
    for name, wrong in (
        ("sizes", torch.tensor([100, 31, 8], dtype=torch.int32)),
        ("weight", stored["weight"][:, :-1]),
        ("scale", stored["scale"][:, :-1]),
        ("perm", stored["perm"] + 1),
    ):
        with pytest.raises(CorruptArtifact, match="rebuild"):
            from_tensors("rptq", stored | {name: wrong})
    with pytest.raises(CorruptArtifact, match="rebuild"):
        from_tensors("rptq", {n: t for n, t in stored.items() if n != "inv_input_scales"})


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("bits", ["w8a8", "w4a8", "w4a4"])
def test_several_columns_of_a_channel_add_up_to_one_number_of_more_levels(
    bits: str, splits: int
) -> None:
    rptq_weight, _, x = _make_weight(bits, "exact", columns=300, splits=splits)
    assert rptq_weight.tensors().keys() == packed_tensor_specs(
        "rptq", rptq_weight.shape, torch.float32, mode="exact"
    ).keys() | ({"offset"} if bits != "w8a8" else set())
    ops = registry.select_backends("cpu")
    x = torch.cat([x, 100 * x[:20], torch.zeros(1, 300)])  # values far outside and none at all
    expected = rptq_weight.fake_quantize_input(x).double() @ rptq_weight.dequantize().double().T
    out = rptq_weight.matmul(x, None, ops)
    assert float((out - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    assert not rptq_weight.fake_quantize_input(torch.zeros(1, 300)).any()
    cut = rptq_weight.slice([(3, 9)], (120, 300))
    assert torch.allclose(
        cut.fake_quantize_input(x[:, 120:]), rptq_weight.fake_quantize_input(x)[:, 120:]
    )
    plain, _, _ = _make_weight(bits, "exact", columns=300, fallback=False)
    inside = x[:200]
    errors = [
        float((each.fake_quantize_input(inside) - inside).norm()) for each in (rptq_weight, plain)
    ]
    reach = [
        float(each.fake_quantize_input(100 * inside).abs().sum()) for each in (rptq_weight, plain)
    ]
    if bits == "w4a4":
        assert errors[0] < 0.75 * errors[1], "finer steps"
    else:
        assert reach[0] > 0.9 * splits * reach[1], "a longer reach"
        assert errors[0] < 1.05 * errors[1]


def test_copies_are_of_the_exact_mode_and_few() -> None:
    flag = r"--splits-per-channel \(--copies\)"
    with pytest.raises(UsageError, match=f"{flag} 2: is for --mode exact, not dynamic"):
        RptqRecipe(BuildConfig(quantization="rptq", mode="dynamic", splits_per_channel=2))
    with pytest.raises(UsageError, match=f"{flag} 2: is for --mode exact, not folded"):
        RptqRecipe(
            BuildConfig(quantization="rptq", bits="w4a8", mode="folded", splits_per_channel=2)
        )
    with pytest.raises(UsageError, match=f"{flag} must be 1 to 4, not 5"):
        BuildConfig(quantization="rptq", splits_per_channel=5)

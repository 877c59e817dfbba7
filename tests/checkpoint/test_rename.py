from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.rename import (
    ResolvedRule,
    Rule,
    apply_rule,
    plan_renames,
    result_tensor_info,
)
from modelmill.core.errors import TensorMismatch

TENSORS = {
    "q": torch.arange(12.0).view(4, 3),
    "k": torch.arange(6.0).view(2, 3) + 100,
    "v": (torch.arange(6.0).view(2, 3) + 200).half(),
    "bias": torch.arange(4.0),
}


def tensor_info(name: str) -> TensorInfo:
    tensor = TENSORS[name]
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype)[6:], tensor.nbytes)


def test_every_source_finds_its_name_and_drops_are_left_alone():
    rules = [Rule("a", ("q",)), Rule("b", ("k", "v"), "cat0")]
    plan = plan_renames(rules, [r".*masked_bias"], {"q": 0, "k": 0, "v": 0, "h.0.masked_bias": 0})
    assert plan == [ResolvedRule("a", ("q",), "copy"), ResolvedRule("b", ("k", "v"), "cat0")]


@pytest.mark.parametrize("available", ["transformer.wte.weight", "wte.weight"])
@pytest.mark.parametrize("written", ["transformer.wte.weight", "wte.weight"])
def test_prefixes_may_be_there_or_not_on_either_side(available, written):
    plan = plan_renames([Rule("embed", (written,))], [], [available], ("", "transformer."))
    assert plan[0].sources == (available,)


def test_drops_match_with_and_without_prefix():
    names = ["h.0.attn.bias", "transformer.h.1.attn.bias"]
    assert plan_renames([], [r"h\.\d+\.attn\.bias"], names, ("", "transformer.")) == []
    assert plan_renames([], [r"transformer\.h\.\d+\.attn\.bias"], names, ("", "transformer.")) == []


def test_missing_and_left_over_tensors_are_named_on_both_sides():
    rules = [Rule(f"t{i}", (f"need{i:02}",)) for i in range(20)]
    with pytest.raises(TensorMismatch) as caught:
        plan_renames(rules, [], ["stray.weight"])
    line = str(caught.value)
    assert "need00" in line
    assert "need04" in line
    assert "need05" not in line
    assert "and 15 more" in line
    assert "20 tensor(s)" in line
    assert "stray.weight" in line
    assert "\n" not in line


def test_only_missing_or_only_left_over_each_have_their_own_hint():
    with pytest.raises(TensorMismatch, match="lacks: x; is the download complete"):
        plan_renames([Rule("t", ("x",))], [], [])
    with pytest.raises(TensorMismatch, match="no place for: x; is num_hidden_layers"):
        plan_renames([], [], ["x"])


def test_missing_experts_ask_for_their_number():
    with pytest.raises(TensorMismatch, match=r"the number of experts in config\.json right"):
        plan_renames([Rule("a", ("layers.0.mlp.experts.7.up_proj.weight",))], [], [])


def test_optional_sources_make_no_target_when_all_are_absent_and_an_error_when_some_are():
    rule = Rule("qkv.bias", ("q.bias", "k.bias"), "cat0", optional=True)
    assert plan_renames([rule], [], []) == []
    assert len(plan_renames([rule], [], ["q.bias", "k.bias"])) == 1
    with pytest.raises(TensorMismatch, match=r"k\.bias"):
        plan_renames([rule], [], ["q.bias"])


def test_one_source_may_serve_several_targets():
    rules = [Rule(n, ("q",), f"part0:{i}/2") for i, n in enumerate("ab")]
    plan = plan_renames(rules, [], ["q"])
    parts = [apply_rule(entry, TENSORS.__getitem__) for entry in plan]
    assert torch.equal(torch.cat(parts), TENSORS["q"])


CASES = [
    ("copy", ("q",), lambda: TENSORS["q"]),
    (
        "cat0",
        ("q", "k", "v"),
        lambda: torch.cat([TENSORS["q"], TENSORS["k"], TENSORS["v"].float()]),
    ),
    ("cat1", ("k", "v"), lambda: torch.cat([TENSORS["k"], TENSORS["v"].float()], 1)),
    ("cat0", ("bias", "bias"), lambda: TENSORS["bias"].repeat(2)),
    ("transpose", ("q",), lambda: TENSORS["q"].t()),
    ("part0:1/2", ("q",), lambda: TENSORS["q"][2:]),
    ("ones:0", ("q",), lambda: torch.ones(4)),
    ("ones:1", ("v",), lambda: torch.ones(3).half()),
    ("transpose+part0:2/3", ("q",), lambda: TENSORS["q"].t()[2:]),
    ("cat0+transpose", ("k", "v"), lambda: torch.cat([TENSORS["k"], TENSORS["v"].float()]).t()),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("options", "sources", "expected"), CASES)
def test_every_step_computes_what_it_says_and_predicts_its_shape(
    options, sources, expected, streamed
):
    entry = ResolvedRule("t", sources, options)
    actual = apply_rule(entry, TENSORS.__getitem__, tensor_info if streamed else None)
    assert torch.equal(actual, expected())
    predicted = result_tensor_info(entry, tensor_info)
    assert (predicted.name, predicted.shape, predicted.decoded_dtype) == (
        "t",
        tuple(actual.shape),
        actual.dtype,
    )
    assert predicted.nbytes == actual.numel() * actual.itemsize


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        ("cat0", ("q", "bias")),
        ("cat1", ("q", "k")),
        ("transpose", ("bias",)),
        ("part0:0/3", ("q",)),
        ("ones:1", ("bias",)),
    ],
)
def test_shapes_that_do_not_fit_are_named_before_and_while_loading(options, sources):
    entry = ResolvedRule("layer.weight", sources, options)
    with pytest.raises(TensorMismatch, match=r"layer\.weight"):
        result_tensor_info(entry, tensor_info)
    with pytest.raises(TensorMismatch, match=r"layer\.weight"):
        apply_rule(entry, TENSORS.__getitem__)


def test_streaming_holds_one_source_at_a_time():
    import weakref

    alive: list[weakref.ref] = []

    def get(name):
        assert not [r for r in alive if r() is not None]
        tensor = TENSORS[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    apply_rule(ResolvedRule("t", ("q", "k", "k", "k"), "cat0"), get, tensor_info)


def test_quantized_sources_are_promised_as_float32():
    predicted = result_tensor_info(
        ResolvedRule("t", ("x",), "copy"), lambda n: TensorInfo(n, (2, 32), "Q4_1", 40)
    )
    assert (predicted.dtype, predicted.nbytes) == ("float32", 256)


def test_mistakes_in_a_rule_are_ours_and_not_the_users():
    with pytest.raises(AssertionError):
        result_tensor_info(ResolvedRule("t", ("q",), "rotate"), tensor_info)
    with pytest.raises(AssertionError):
        plan_renames([Rule("t", ("q",)), Rule("t", ("k",))], [], ["q", "k"])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True),
    st.lists(st.sampled_from("abcdefgh"), unique=True),
)
def test_a_plan_exists_exactly_when_both_sides_agree(required, available):
    rules = [Rule(name.upper(), (name,)) for name in required]
    if set(required) == set(available):
        assert [e.target for e in plan_renames(rules, [], available)] == [
            n.upper() for n in required
        ]
    else:
        with pytest.raises(TensorMismatch) as caught:
            plan_renames(rules, [], available)
        listed = str(caught.value)
        assert all(f"{n}" in listed for n in set(required) ^ set(available))


def test_a_convolution_of_one_pixel_is_a_matrix() -> None:
    weight = torch.randn(3, 5, 1, 1)
    matrix = apply_rule(ResolvedRule("t", ("w",), "pointwise"), {"w": weight}.__getitem__)
    assert torch.equal(matrix, weight[:, :, 0, 0])
    with pytest.raises(TensorMismatch, match="no convolution of 1×1"):
        apply_rule(
            ResolvedRule("t", ("w",), "pointwise"), {"w": torch.zeros(3, 5, 3, 3)}.__getitem__
        )


def test_flatten_puts_all_values_one_after_another() -> None:
    rows = {"q": torch.arange(6.0).reshape(2, 3), "k": torch.arange(6.0, 9.0).reshape(1, 3)}
    rule = ResolvedRule("t", ("q", "k"), "cat0+flatten")
    assert torch.equal(apply_rule(rule, rows.__getitem__), torch.arange(9.0))


def test_ranges_of_rows_are_scaled_and_rounded_once():
    """As float32, of a matrix and of a bias; other counts of rows are refused."""
    rule = ResolvedRule("t", ("v",), "copy+scale_rows:1*0.5/1*1.1")
    scaled = apply_rule(rule, TENSORS.__getitem__)
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, TENSORS["v"].float() * torch.tensor([[0.5], [1.1]]))
    bias = apply_rule(ResolvedRule("t", ("bias",), "scale_rows:4*3.0"), TENSORS.__getitem__)
    assert torch.equal(bias, TENSORS["bias"] * 3)
    with pytest.raises(TensorMismatch, match=r"has not 5 rows"):
        result_tensor_info(ResolvedRule("t", ("q",), "scale_rows:5*2.0"), tensor_info)
